import pytest

from jaxserve.cli.translation.containers import Container, from_run, from_yaml
from jaxserve.errors import ConfigError


def test_the_options_of_docker_run() -> None:
    container = from_run(
        [
            "sudo", "docker", "run", "--rm", "-it", "--gpus", '"device=0,1"', "-v", "~/m:/models/", "--name", "x",
            "-p", "127.0.0.1:9:8", "--env", "A=1", "-e", "B", "--ipc=host", "vllm/vllm-openai:v1", "--model",
            "/models/a",
        ],
        {"C": "3"},
    )  # fmt: skip
    assert container == Container(
        image="vllm/vllm-openai:v1",
        entrypoint=None,
        words=("--model", "/models/a"),
        environment={"C": "3", "A": "1", "B": "$B"},
        ports={8: ("127.0.0.1", 9)},
        volumes={"/models": "~/m"},
        devices="0,1",
        others=("--rm", "-it", "--name x", "--ipc=host"),
    )


@pytest.mark.parametrize("words", [["docker", "build", "."], ["docker", "run", "-it"], ["vllm", "serve", "run"]])
def test_what_starts_no_container(words: list[str]) -> None:
    assert from_run(words, {}) is None


def test_a_compose_file() -> None:
    [container] = from_yaml(
        """
services:
  llm:
    image: lmsysorg/sglang:latest
    entrypoint: python3 -m sglang.launch_server
    command:
      --model-path a/b
      --port 30000
    ports: ["8080:30000"]
    environment:
      HF_TOKEN: secret
    restart: always
"""
    )
    assert container.entrypoint == ("python3", "-m", "sglang.launch_server")
    assert container.words == ("--model-path", "a/b", "--port", "30000")
    assert container.ports == {30000: ("0.0.0.0", 8080)}
    assert container.environment == {"HF_TOKEN": "secret"}
    assert container.others == ("restart",)


def test_a_manifest() -> None:
    [container] = from_yaml(
        """
kind: Deployment
spec:
  template:
    spec:
      containers:
        - image: vllm/vllm-openai
          command: [vllm, serve]
          args: [a/b, --port, 80, $(OPEN), $(nproc)]
          env: [{name: A, value: "1"}, {name: B, valueFrom: {secretKeyRef: {name: b}}}]
          ports: [{containerPort: 80}]
"""
    )
    assert container.entrypoint == ("vllm", "serve")
    assert container.words == ("a/b", "--port", "80", "${OPEN}", "$(nproc)")
    assert container.environment == {"A": "1", "B": "$B"}
    assert container.ports == {}


def test_a_container_that_stands_in_many_places_is_found_once() -> None:
    many = "".join(f"l{i + 1}: &l{i + 1} [*l{i}, *l{i}]\n" for i in range(40))
    [container] = from_yaml(f"l0: &l0 {{image: x}}\n{many}")
    assert container.image == "x"


def test_defaults_of_variables_hold() -> None:
    [container] = from_yaml(
        "image: x/${NAME:-sglang}\nports: ['${PORT:-80}:8000']\n"
        "volumes: ['${CACHE:-$HOME/c}:/c', '${A}:/a']\ncommand: $M"
    )
    assert container.image == "x/sglang"
    assert container.ports == {8000: ("0.0.0.0", 80)}
    assert container.volumes == {"/c": "$HOME/c", "/a": "${A}"}


@pytest.mark.parametrize("text", ["vllm serve a", "a: [", "services: {}", "\tx"])
def test_text_of_another_form_has_no_containers(text: str) -> None:
    assert from_yaml(text) == []


def test_a_quotation_must_end() -> None:
    with pytest.raises(ConfigError, match="can't be read: no closing quotation"):
        from_yaml('image: x\ncommand: "--x \'a"')
