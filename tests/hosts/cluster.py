"""A Ray cluster on the test hosts, by `ray up` with the file that is shipped, and `rachis serve` on its head."""

import asyncio
import json
import logging
import os
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml
from ray._private.authentication.authentication_token_generator import generate_new_authentication_token
from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
from ray._raylet import GcsClient  # type: ignore[attr-defined]  # compiled
from ray.core.generated.gcs_pb2 import GcsNodeInfo
from ray.exceptions import RayError

from benchmarks.certificates import Authority
from cluster_core.clock import monotonic_s
from cluster_wire.secret import Secret, read_secret, write_secret
from control_plane.access.api_keys import new_key
from control_plane.access.key_file import edit
from control_plane.access.roles import Role
from tests.hosts.netlab import Host, LabError

logger = logging.getLogger(__name__)

SHIPPED = Path("cluster_configs/ray/onprem.yaml")
ROUTER_PORT = 7421
ADMIN_PORT = 7422
REDIS_PORT = 6390
# Where `ray up` brings the files of `write_site_files`.
SECURITY = {
    "keys_file": "/root/security/keys.json",
    "secret_file": "/root/security/secret",
    "certificate_file": "/root/security/router.crt",
    "certificate_key_file": "/root/security/router.key",
    "ca_file": "/root/security/authority.pem",
}
# What the start command of the shipped file gives to hosts of these names.
_RESOURCES = {"prefill": {"CPU": 2, "rachis_prefill": 1}, "decode": {"CPU": 2, "rachis_decode": 1}}
_RAY_UP_S = 120.0
_NODES_S = 300.0
_READY_S = 150.0
_STOP_S = 60.0
_POLL_S = 0.2


class Cluster:
    """The first of `hosts` is the head; `ray up` is run on the laptop. `service` is the service configuration."""

    def __init__(self, laptop: Host, hosts: Sequence[Host], service: dict[str, Any], logs: Path) -> None:
        self.laptop = laptop
        self.hosts = {host.name: host for host in hosts}
        self.head = hosts[0]
        self._service = service
        self._serve_log = logs / "serve.log"
        self._serving: subprocess.Popen[bytes] | None = None
        # The API key of whoever asks, once there is one.
        self.key = ""

    @property
    def ca(self) -> Path:
        """By which the router is known."""
        return self.laptop.home / "security" / "authority.pem"

    @property
    def secret(self) -> Secret:
        return read_secret(self.laptop.home / "security" / "secret")

    @property
    def asking(self) -> str:
        """What a command on a host has in its environment."""
        return f"RACHIS_API_KEY={self.key} RACHIS_CA_FILE=/root/security/authority.pem"

    @property
    def router_address(self) -> str:
        return f"{self.head.address}:{ROUTER_PORT}"

    @property
    def admin_address(self) -> str:
        return f"{self.head.address}:{ADMIN_PORT}"

    def write_site_files(self) -> None:
        """The shipped file with this site's values in place of CHANGE-ME, and the service's configuration beside it."""
        shipped = self.laptop.home / "project" / SHIPPED
        cluster = yaml.safe_load(shipped.read_text())
        cluster["provider"] |= {
            "head_ip": self.head.address,
            "worker_ips": [host.address for host in self.hosts.values() if host is not self.head],
        }
        cluster["auth"] |= {"ssh_user": "root"}
        cluster["metadata"] = {"hosts": {self.hosts[name].address: has for name, has in _RESOURCES.items()}}
        cluster["file_mounts"] |= {name: name for name in ("~/service.yaml", "~/security")}
        (self.laptop.home / "cluster.yaml").write_text(yaml.safe_dump(cluster, sort_keys=False))
        (self.laptop.home / "service.yaml").write_text(yaml.safe_dump(self._service))
        self._write_security_files(self.laptop.home / "security")
        self._write_token(self.laptop.home / ".ray")

    def _write_token(self, folder: Path) -> None:
        """Ray's, as `ray get-auth-token --generate` does; this process brings it from now on, too."""
        folder.mkdir()
        token = folder / "auth_token"
        token.write_text(generate_new_authentication_token())
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)
        maybe_enable_token_auth_if_token_available(warn_if_disabled=False)

    def _write_security_files(self, folder: Path) -> None:
        Authority(folder).sign("router", self.head.address)
        write_secret(folder / "secret")
        key, self.key = new_key("lab", "lab", list(Role), lowest_priority=0, now_s=0.0, expires_s=None)
        edit(folder / "keys.json", lambda keys: keys.update({key.key_id: key}))

    async def up(self) -> None:
        """The dry run, `ray up`, then all hosts in the cluster. Raises LabError."""
        check = "rachis cluster check ~/cluster.yaml --config ~/service.yaml"
        ray_up = "RAY_UP_enable_autoscaler_v2=0 ray up --yes --no-config-cache ~/cluster.yaml"
        await asyncio.to_thread(self.laptop.run, f"cd project; {check} && {ray_up}", _RAY_UP_S)
        logger.info("`ray up` returned")
        try:
            await self.until_nodes(self.hosts, _NODES_S / 2)
        except LabError as error:
            # Ray starts the other hosts by itself. Where it has not, an operator says `ray up` again.
            logger.warning("`ray up` is said again: %s", error)
            await asyncio.to_thread(self.laptop.run, f"cd project; {ray_up}", _RAY_UP_S)
            await self.until_nodes(self.hosts)

    async def nodes(self) -> set[str]:
        """Names of the hosts that Ray takes for alive; none while its head does not answer."""
        return await asyncio.to_thread(self._nodes)

    def _monitored(self) -> str:
        """What Ray's autoscaler has last logged on the head."""
        logs = sorted((self.head.tmp / "ray").glob("session_2*/logs/monitor.*"))
        return "\n".join(f"{log.name}: {log.read_text(errors='replace')[-4000:]}" for log in logs)

    async def until_nodes(self, names: Iterable[str], timeout_s: float = _NODES_S) -> None:
        """Until Ray takes exactly these hosts for alive. Raises LabError."""
        wanted, deadline_s = set(names), monotonic_s() + timeout_s
        while (alive := await self.nodes()) != wanted:
            if monotonic_s() > deadline_s:
                raise LabError(
                    f"Ray has {sorted(alive)} after {timeout_s:g} s, not {sorted(wanted)}:\n{self._monitored()}"
                )
            await asyncio.sleep(_POLL_S)
        logger.info("Ray has %s", " ".join(sorted(alive)))

    async def serve(self) -> None:
        """`rachis serve` on the head, until it says that it is ready. Raises LabError with its log."""
        command = "rachis serve --address auto --config service.yaml --set gateway.port=null --json"
        self._serving = self.head.start(command, self._serve_log)
        await self._until_ready(self._serving)
        logger.info("`rachis serve` is ready")

    def events(self) -> list[dict[str, Any]]:
        """What `rachis serve` has said."""
        lines = self._serve_log.read_text(errors="replace").splitlines()
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]

    async def stop_serving(self) -> int:
        """Its exit status, after Ctrl-C. Raises LabError when it takes too long."""
        serving = self._serving
        assert serving is not None
        self.head.run("kill -INT $(pgrep --exact rachis)")
        try:
            return await asyncio.to_thread(serving.wait, _STOP_S)
        except subprocess.TimeoutExpired:
            raise LabError(f"rachis serve did not stop in {_STOP_S:g} s:\n{self._serve_log.read_text()}") from None

    async def down(self) -> str:
        """Takes Ray down as the shipped file says: `ray down`, whose output it gives, then the others. The head's
        autoscaler would start a node again that stops before it."""
        others = [host for host in self.hosts.values() if host is not self.head]
        ssh = "ssh -o StrictHostKeyChecking=no -o LogLevel=ERROR root@{} 'bash -ic \"ray stop\"'"
        output = await asyncio.to_thread(self.laptop.run, "ray down --yes cluster.yaml", _RAY_UP_S)
        await asyncio.gather(*(asyncio.to_thread(self.laptop.run, ssh.format(host.address)) for host in others))
        return output

    def _nodes(self) -> set[str]:
        try:
            nodes = GcsClient(address=f"{self.head.address}:6379").get_all_node_info(timeout=5)
        except (RayError, ConnectionError, TimeoutError, RuntimeError):
            return set()
        return {node.node_manager_hostname for node in nodes.values() if node.state == GcsNodeInfo.ALIVE}

    async def _until_ready(self, serving: subprocess.Popen[bytes]) -> None:
        deadline_s = monotonic_s() + _READY_S
        while not any(event.get("event") == "ready" for event in self.events()):
            ended = serving.poll()
            if ended is not None or monotonic_s() > deadline_s:
                how = f"ended with {ended}" if ended is not None else f"is not ready after {_READY_S:g} s"
                raise LabError(f"rachis serve {how}:\n{self._serve_log.read_text(errors='replace')[-4000:]}")
            await asyncio.sleep(_POLL_S)
