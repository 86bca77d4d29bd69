"""What a profile means on Ray: its settings, and the resources that its application asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ray.serve import Application

from jaxserve.config.schema import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.ray import application, build
from jaxserve.ray.profile import bundles, load_profile

TWO_NODES = {"nnodes": 2, "tp_size": 4}


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "profile.yaml"
    path.write_text("model: tiny\ndevice: cuda\ntp_size: 2\nport: 9000\n")
    return path


def refusal_of(settings: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as raised:
        load_profile(None, settings)
    return str(raised.value)


def engine_of(made: Application) -> Any:
    """Return the deployment `engine` of an application, which Serve has no public name for."""
    return made._bound_deployment.init_args[0]._bound_deployment


def test_settings_have_precedence_over_the_profile(profile: Path) -> None:
    loaded = load_profile(profile, {"tp-size": 4, "max_num_seqs": 3})
    assert (loaded.engine.model, loaded.engine.tp_size, loaded.engine.max_running_requests) == ("tiny", 4, 3)
    assert load_profile(profile, {}).engine.tp_size == 2


def test_texts_are_read_as_those_of_flags() -> None:
    """`serve run jaxserve.ray:build KEY=VALUE` gives nothing else."""
    engine = load_profile(
        None, {"tp_size": "2", "nnodes": "2", "disable_radix_cache": "true", "cuda_graph_bs": "1,2", "model": "7"}
    ).engine
    assert (engine.tp_size, engine.nnodes, engine.disable_radix_cache) == (2, 2, True)
    assert (engine.cuda_graph_bs, engine.model) == ((1, 2), "7")
    assert load_profile(None, {"nnodes": "1"}).engine.dist_init_addr is None
    assert "max_running_requests must be a whole number, got 'many'" in refusal_of({"max_running_requests": "many"})


def test_where_a_server_would_listen_is_noted(profile: Path) -> None:
    [note] = load_profile(profile, {}).notes
    assert note == f"{profile}:4: port: not used, http_options of Serve's configuration say where it listens"
    [note] = load_profile(None, {"host": "0.0.0.0"}).notes
    assert note.startswith("settings: host: not used")
    assert load_profile(None, {"drain_timeout": 3}).notes == ()


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("uds", {"uds": "/tmp/socket"}),
        ("api_server_count", {"api_server_count": 2}),
        ("node_rank", {"node_rank": 1, **TWO_NODES}),
        ("dist_init_addr", {"dist_init_addr": "10.0.0.1:5000", **TWO_NODES}),
        ("root_path", {"root_path": "/v2"}),
        ("ssl_certfile", {"ssl_certfile": "/tmp/c", "ssl_keyfile": "/tmp/k"}),
        ("ssl_certfile", {"ssl_certfile": "/tmp/c", "ssl_keyfile": "/tmp/k", "ssl_ca_certs": "/tmp/a"}),
        *((name, {name: 1000}) for name in ("max_header_bytes", "request_read_timeout", "keep_alive_timeout")),
    ],
)
def test_what_has_no_meaning_in_a_replica_is_refused(name: str, settings: dict[str, Any]) -> None:
    assert f"settings: {name}: {name} has no meaning in a replica of Ray Serve: " in refusal_of(settings)
    kept = {key: value for key, value in settings.items() if key in TWO_NODES}
    assert load_profile(None, kept).engine.nnodes == kept.get("nnodes", 1)


def test_other_mistakes_are_named() -> None:
    assert "nosuch is not a known setting" in refusal_of({"nosuch": 1})
    assert "tp_size=2" in refusal_of({"tp_size": 2, "nnodes": 3})
    with pytest.raises(ConfigError, match="/none\\.yaml can't be read"):
        load_profile("/none.yaml", {})


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"device": "cpu", "tp_size": 2}, [{"CPU": 1.5}]),
        ({"device": "cuda", "tp_size": 2}, [{"CPU": 1.5, "GPU": 2.0}]),
        ({"device": "cuda", "dp_size": 2, "dp_mode": "replicas"}, [{"CPU": 1.5, "GPU": 2.0}]),
        ({"device": "cuda", "tp_size": 2, "pp_size": 2, "nnodes": 2}, [{"CPU": 1.5, "GPU": 2.0}] * 2),
        ({"device": "tpu", "tp_size": 4}, [{"CPU": 1.5, "TPU": 4.0}]),
        ({"device": "tpu", "tp_size": 8, "nnodes": 2}, [{"CPU": 1.5, "TPU": 4.0}] * 2),
    ],
)
def test_each_process_of_a_replica_asks_for_its_devices(settings: dict[str, Any], expected: list[Any]) -> None:
    engine: EngineConfig = load_profile(None, settings).engine
    assert bundles(engine, 1.5) == expected


def test_an_application_on_one_node_asks_for_its_devices(profile: Path) -> None:
    made = application(load_profile(profile, {}), replicas=3, num_cpus=2)
    engine = engine_of(made)
    assert (made._bound_deployment.name, engine.name, engine.num_replicas) == ("ingress", "engine", 3)
    options = engine.ray_actor_options
    assert (options["num_cpus"], options["num_gpus"], options["resources"]) == (2, 2, {})
    assert engine._replica_config.placement_group_bundles is None
    assert made._bound_deployment.ray_actor_options["resources"] == {"node:__internal_head__": 0.001}
    tpu = engine_of(application(load_profile(None, {"device": "tpu", "tp_size": 4}))).ray_actor_options
    assert (tpu["num_gpus"], tpu["resources"]) == (0, {"TPU": 4})


def test_a_mesh_over_nodes_asks_for_a_node_for_each_process() -> None:
    engine = engine_of(application(load_profile(None, {"device": "cuda", **TWO_NODES})))
    assert engine._replica_config.placement_group_bundles == [{"CPU": 1, "GPU": 2}] * 2
    assert engine._replica_config.placement_group_strategy == "STRICT_SPREAD"
    assert engine.ray_actor_options["num_gpus"] == 2


def test_a_device_that_nobody_named_is_looked_for_in_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="set device to cuda, tpu or cpu"):
        build({})
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    one_cpu = {"CPU": 1.0}
    for resources, expected in (({"CPU": 4.0, "GPU": 2.0}, {"CPU": 1.0, "GPU": 1.0}), ({"CPU": 4.0}, one_cpu)):
        monkeypatch.setattr("ray.cluster_resources", lambda found=resources: found)
        assert bundles(EngineConfig(), 1.0) == [expected]


def test_a_range_of_replicas_is_scaled_on_the_queues() -> None:
    scaling = engine_of(
        build({"device": "cpu", "replicas": {"min": 2, "max": "5"}})
    )._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas) == (2, 5)
    assert scaling.policy.policy_function == "jaxserve.ray.autoscaling:scale_on_queue"


def test_build_takes_settings_among_its_arguments(profile: Path) -> None:
    made = build(
        {"profile": str(profile), "settings": {"tp_size": 4}, "page_size": "32", "replicas": "2", "num_cpus": "0.5"}
    )
    engine = engine_of(made)
    config, server, *_ = engine.init_args
    assert (config.model, config.tp_size, config.page_size, server.port) == ("tiny", 4, 32, 9000)
    assert (engine.num_replicas, engine.ray_actor_options["num_cpus"]) == (2, 0.5)
    assert engine_of(build({"device": "cpu"})).num_replicas == 1


@pytest.mark.parametrize(
    "replicas",
    [
        "many",
        0,
        -1,
        2.5,
        None,
        {"min": 1},
        {"min": 0, "max": 2},
        {"min": 3, "max": 2},
        {"min": 1, "max": 2, "most": 3},
    ],
)
def test_a_number_of_replicas_that_is_none_is_refused(replicas: Any) -> None:
    with pytest.raises(ConfigError, match="replicas must be a whole number of at least 1, or have min and max, got"):
        build({"replicas": replicas})


def test_other_arguments_that_are_wrong_are_named() -> None:
    with pytest.raises(ConfigError, match=r"settings must map names of settings to values, got \[1\]"):
        build({"settings": [1]})
    for num_cpus in ("few", -1, "nan", None):
        with pytest.raises(ConfigError, match=f"num_cpus must be a number of at least 0, got {num_cpus!r}"):
            build({"num_cpus": num_cpus})
    with pytest.raises(ConfigError, match="uds has no meaning"):
        build({"uds": "/tmp/socket"})
