from __future__ import annotations

import os

import pytest

from jaxserve.api_types import Devices
from jaxserve.config.schema import EngineConfig
from jaxserve.engine.client import engine_processes
from jaxserve.engine.client.device_assignment import assign_devices, find_devices
from jaxserve.engine.process.launch_protocol import ReplicaResources
from jaxserve.errors import ConfigError, EngineDeadError

pytestmark = pytest.mark.process


def gpus(count: int) -> Devices:
    return Devices(platform="gpu", num_devices=count, num_chips=count)


def visible(dp: int, tp: int, devices: Devices, environment: dict[str, str], variable: str) -> list[str]:
    config = EngineConfig(dp_size=dp, tp_size=tp)
    return [resources.environment[variable] for resources in assign_devices(config, devices, environment)]


def test_gpus_are_assigned_from_the_visible_ones() -> None:
    name = "CUDA_VISIBLE_DEVICES"
    assert visible(2, 2, gpus(4), {}, name) == ["0,1", "2,3"]
    assert visible(3, 1, gpus(4), {}, name) == ["0", "1", "2"]
    assert visible(2, 1, gpus(2), {name: "5, 3"}, name) == ["5", "3"]
    assert visible(2, 1, gpus(2), {name: "GPU-aa,MIG-bb"}, name) == ["GPU-aa", "MIG-bb"]
    config = EngineConfig(dp_size=2)
    assert [resources.name for resources in assign_devices(config, gpus(2), {})] == ["DP0", "DP1"]


def test_replicas_divide_the_devices_that_are_named() -> None:
    def assigned(devices: Devices, environment: dict[str, str], **settings: object) -> list[dict[str, str]]:
        config = EngineConfig(dp_size=2, dp_mode="replicas", **settings)  # type: ignore[arg-type]
        return [resources.environment for resources in assign_devices(config, devices, environment)]

    name = "CUDA_VISIBLE_DEVICES"
    assert assigned(gpus(2), {}, device_ids=(7, 5)) == [{name: "7"}, {name: "5"}]
    assert assigned(gpus(2), {name: "GPU-a,GPU-b,GPU-c"}, device_ids=(2, 0)) == [{name: "GPU-c"}, {name: "GPU-a"}]
    assert assigned(gpus(4), {}, tp_size=2, base_gpu_id=1, gpu_id_step=2) == [{name: "1,3"}, {name: "5,7"}]
    chips = assigned(Devices(platform="tpu", num_devices=4, num_chips=4), {}, tp_size=2, device_ids=(4, 5, 6, 7))
    assert [own["TPU_VISIBLE_CHIPS"] for own in chips] == ["4,5", "6,7"]
    with pytest.raises(ConfigError, match="device_ids=0,1 chooses among GPUs or TPU chips"):
        assigned(Devices(platform="cpu", num_devices=1, num_chips=1), {}, device_ids=(0, 1))


async def test_a_replica_counts_the_devices_that_it_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    async def found(config: EngineConfig) -> Devices:
        return gpus(2)

    async def start(config: EngineConfig, module: str, resources: ReplicaResources, num_clients: int) -> None:
        assert resources.environment["CUDA_VISIBLE_DEVICES"] in "7,5"
        assert config.device_ids is None
        raise EngineDeadError("as asked")

    monkeypatch.setattr(engine_processes, "find_devices", found)
    monkeypatch.setattr(engine_processes, "_start", start)
    with pytest.raises(EngineDeadError, match="as asked"):
        await engine_processes.EngineProcesses.launch(EngineConfig(dp_size=2, device_ids=(7, 5)))


def test_too_few_gpus_are_an_error_with_sizes_that_fit() -> None:
    with pytest.raises(ConfigError) as caught:
        assign_devices(EngineConfig(dp_size=4, tp_size=2), gpus(4), {})
    assert str(caught.value) == (
        "tp_size=2 and dp_size=4 take 8 devices, and there are 4; what fits: --tp-size 2 --dp-size 2"
    )
    with pytest.raises(ConfigError, match=r"what fits: --tp-size 1 --dp-size 1$"):
        assign_devices(EngineConfig(dp_size=2, tp_size=4), gpus(1), {})


def test_a_replica_has_the_devices_of_all_its_stages() -> None:
    two = EngineConfig(dp_size=2, tp_size=2, pp_size=2)
    own = [resources.environment["CUDA_VISIBLE_DEVICES"] for resources in assign_devices(two, gpus(8), {})]
    assert own == ["0,1,2,3", "4,5,6,7"]
    with pytest.raises(ConfigError) as caught:
        assign_devices(two, gpus(4), {})
    assert str(caught.value) == (
        "tp_size=2 and dp_size=2 with pp_size=2 take 8 devices, and there are 4; what fits: --tp-size 2 --dp-size 1 "
        "--pp-size 2"
    )
    with pytest.raises(ConfigError, match=r"what fits: --tp-size 1 --dp-size 1 --pp-size 2$"):
        assign_devices(two, gpus(3), {})
    v6e = Devices(platform="tpu", num_devices=8, num_chips=8)
    assert assign_devices(two, v6e, {})[1].environment["TPU_VISIBLE_CHIPS"] == "4,5,6,7"
    with pytest.raises(ConfigError, match=r"tp_size=1 with pp_size=3 gives each replica 3 TPU chips"):
        assign_devices(EngineConfig(dp_size=2, pp_size=3), v6e, {})


def test_a_tpu_is_divided_by_chips() -> None:
    v6e = Devices(platform="tpu", num_devices=8, num_chips=8)
    [first, second] = assign_devices(EngineConfig(dp_size=2, tp_size=4), v6e, {})
    assert first == ReplicaResources(
        "DP0",
        {"TPU_VISIBLE_CHIPS": "0,1,2,3", "TPU_CHIPS_PER_PROCESS_BOUNDS": "2,2,1", "TPU_PROCESS_BOUNDS": "1,1,1"},
    )
    assert second.environment["TPU_VISIBLE_CHIPS"] == "4,5,6,7"
    for devices in (v6e, gpus(8), Devices(platform="cpu", num_devices=1, num_chips=1)):
        assert [one.index for one in assign_devices(EngineConfig(dp_size=2, tp_size=4), devices, {})] == [0, 1]
    two_on_a_chip = Devices(platform="tpu", num_devices=8, num_chips=4)
    assert visible(4, 2, two_on_a_chip, {"TPU_VISIBLE_CHIPS": "3,2,1,0"}, "TPU_VISIBLE_CHIPS") == ["3", "2", "1", "0"]
    with pytest.raises(ConfigError, match=r"tp_size=1 gives each replica 0\.5 TPU chips"):
        assign_devices(EngineConfig(dp_size=2), two_on_a_chip, {})
    with pytest.raises(ConfigError, match=r"3 TPU chips, and a process can have 1, 2, 4, 8"):
        assign_devices(EngineConfig(dp_size=2, tp_size=3), v6e, {})


@pytest.mark.parametrize(("threads", "replicas", "each"), [(8, 2, "4"), (8, 3, "2"), (2, 4, "1")])
def test_a_cpu_is_divided_by_threads(threads: int, replicas: int, each: str) -> None:
    cpu = Devices(platform="cpu", num_devices=1, num_chips=1)
    found = visible(replicas, 1, cpu, {"NPROC": str(threads)}, "NPROC")
    assert found == [each] * replicas


def test_a_cpu_has_a_limit_of_replicas() -> None:
    with pytest.raises(ConfigError, match=r"dp_size=65536: .* at most \d+ replicas"):
        assign_devices(EngineConfig(dp_size=65536), Devices(platform="cpu", num_devices=1, num_chips=1), {})


async def test_the_devices_are_listed_by_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    """Listed in a separate process, because this one would not release a device."""
    assert (await find_devices(EngineConfig(device="cpu"))).platform == "cpu"
    monkeypatch.setenv("JAX_PLATFORMS", "cuda,cpu")
    monkeypatch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=3")
    with pytest.raises(ConfigError, match="device=tpu: no TPU is found here"):
        await find_devices(EngineConfig(device="tpu"))
    with pytest.raises(ConfigError, match="device_ids=0,1 names 2 devices, and tp_size=1 dp_size=3 need 3"):
        await find_devices(EngineConfig(device="cuda", device_ids=(0, 1), dp_size=3, dp_mode="replicas"))
    monkeypatch.setenv("JAX_PLATFORMS", "")
    found = await find_devices(EngineConfig())
    assert (found.platform, found.num_devices) == ("cpu", 3)
