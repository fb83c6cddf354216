"""What the container file says holds: its health checks."""

import json

from tests import ROOT

CONTAINER_FILE = ROOT / "cluster_configs/containers/Dockerfile"


def test_images_are_healthy_when_they_take_requests() -> None:
    lines = CONTAINER_FILE.read_text().splitlines()
    checks = [line.partition(" CMD ")[2] for line in lines if line.startswith("HEALTHCHECK")]
    assert [json.loads(check) for check in checks] == [["rachis", "status", "--ready"]] * 2
