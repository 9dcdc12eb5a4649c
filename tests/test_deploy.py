"""What deploy/ and its guide name exists: options, metrics, services, times that fit together."""

from __future__ import annotations

import configparser
import json
import re
import shlex
from pathlib import Path

import grpc
import pytest
import typer.main

from engine.serving import cli, compatibility, grpc_server, top
from proto.treadle.v1 import generation_pb2 as pb
from proto.treadle.v1 import generation_pb2_grpc as pb_grpc
from tests.serving.fake_core import FakeCore
from tests.serving.running_server import running

ROOT = Path(__file__).parents[1]
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "treadle.json").read_text())
GUIDE = (ROOT / "docs" / "operations.md").read_text()
UNIT = ROOT / "deploy" / "systemd" / "treadle.service"
MANIFEST = ROOT / "deploy" / "kubernetes" / "treadle.yaml"
OPTIONS = {
    option
    for parameter in typer.main.get_command(cli.app).commands["serve"].params
    for option in parameter.opts
}
METRIC = re.compile(r"\b(?:vllm|treadle):\w+")


@pytest.fixture(scope="module")
def names() -> set[str]:
    """Metrics of a server that has answered and refused."""
    with (
        running(FakeCore(), metrics_port=0) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        stub = pb_grpc.GenerationServiceStub(channel)
        list(stub.Generate(pb.GenerateRequest(text="a", params=pb.SamplingParams(max_tokens=2))))
        with pytest.raises(grpc.RpcError):
            list(stub.Generate(pb.GenerateRequest()))
        sample = top.read(server.metrics_url)
    found = {name for name, _ in sample.values if not name.endswith("_created")}
    assert len(found) > 30
    return found


def base(name: str) -> str:
    """The name under which a guide speaks of a histogram."""
    return re.sub(r"_(bucket|sum|count)$", "", name)


def test_dashboard_asks_for_metrics_that_exist(names):
    expressions = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    asked = set(METRIC.findall(" ".join(expressions)))
    assert len(DASHBOARD["panels"]) >= 12 and len(asked) >= 15
    assert asked - names == set()


def test_panels_have_their_own_places_and_titles():
    panels = DASHBOARD["panels"]
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells) and max(x for x, _ in cells) < 24
    assert len({panel["title"] for panel in panels}) == len(panels)
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_guide_explains_every_metric_and_no_other(names):
    table = GUIDE.split("## Metrics")[1].split("\n## ")[0]
    explained = set(METRIC.findall(table))
    assert explained == {base(name) for name in names}


def test_every_option_the_guide_names_is_one():
    named = set(re.findall(r"`(--[a-z-]+)", GUIDE))
    others = {"--rate", "--concurrency", "--protocol"}  # of `treadle bench serve`
    assert len(named) > 15 and named - OPTIONS - others == set()


def test_unit_starts_with_options_that_exist():
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str
    unit.read(UNIT)
    service = unit["Service"]
    words = shlex.split(service["ExecStart"].replace("\\\n", " "))
    assert words[:2] == ["/opt/treadle/.venv/bin/treadle", "serve"]
    assert {word for word in words if word.startswith("--")} <= OPTIONS
    drain = float(words[words.index("--drain-seconds") + 1])
    assert float(service["TimeoutStopSec"]) > drain + 10


@pytest.fixture(scope="module")
def engine_container():
    yaml = pytest.importorskip("yaml", reason="needs pyyaml, which the extra `gateway` brings")
    documents = {one["kind"]: one for one in yaml.safe_load_all(MANIFEST.read_text())}
    assert documents.keys() == {"Service", "Deployment", "PodDisruptionBudget"}
    pod = documents["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    return pod, container


def test_manifest_starts_with_options_that_exist(engine_container):
    pod, container = engine_container
    given = dict(word.split("=") for word in container["args"] if word.startswith("--"))
    assert given.keys() <= OPTIONS and "--token-file" in given
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert (str(ports["grpc"]), str(ports["metrics"])) == (given["--port"], given["--metrics-port"])
    wait = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > wait + float(given["--drain-seconds"]) + 10


def test_probes_ask_for_services_that_health_knows(engine_container):
    _, container = engine_container
    known = {"", grpc_server.SERVICE, *compatibility.names()}
    for name in ("startupProbe", "readinessProbe"):
        probe = container[name]["grpc"]
        assert probe["port"] == 50051 and probe.get("service", "") in known
