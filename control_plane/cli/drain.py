"""`rachis drain`: a worker out of rotation, and back."""

from rachis.v1 import admin_pb2 as admin
from rachis.v1 import worker_pb2 as wire

from control_plane.cli.output import out, print_json
from control_plane.client import RachisClient


async def drain(address: str, worker_id: str, *, resume: bool, as_json: bool) -> None:
    async with RachisClient(address) as client:
        if resume:
            resumed = await client.admin.ResumeWorker(admin.ResumeWorkerRequest(worker_id=worker_id), timeout=10)
            state = resumed.state
        else:
            drained = await client.admin.DrainWorker(admin.DrainWorkerRequest(worker_id=worker_id), timeout=10)
            state = drained.state
    name = wire.WorkerState.Name(state).removeprefix("WORKER_STATE_").lower()
    if as_json:
        print_json({"worker_id": worker_id, "state": name})
    else:
        out.print(f"{worker_id} is {name}")
