"""`docs/reference/http.md`: the routes of a gateway and of a router's own port, from their tables."""

from control_plane.access.roles import HTTP_NEEDS, Need
from control_plane.console.pages import ROUTES as CONSOLE_ROUTES
from control_plane.metrics.probe_server import ROUTES
from tools.reference.table import WRITTEN, code, table

_INTRODUCTION = """\
What each takes and answers, and how it differs from vLLM's own: [HTTP](../http.md). The statuses of errors:
[errors](errors.md). Who has which role: [access](../access.md). In a service without keys everybody may ask for
everything.
"""


def page() -> str:
    parts = [
        "# HTTP\n",
        WRITTEN.format(source="[roles.py](../../control_plane/access/roles.py)"),
        _INTRODUCTION,
        "## Of a gateway\n",
        "At `gateway.host` and `gateway.port`.\n",
        table(("route", "needs"), ((code(path), _needs(need)) for path, need in HTTP_NEEDS.items())),
        "A route that is not in this table needs the role `operate`.\n",
        "## Of a router\n",
        "At `router.metrics_host`, which is `router.host` unless told otherwise, and `router.metrics_port`. [Calls of "
        "the console](../console.md) ask for a key; `/metrics` does with `security.metrics_need_key`.\n",
        table(("route", "what"), ((code(path), what) for path, what in {**ROUTES, **CONSOLE_ROUTES}.items())),
    ]
    return "\n".join(parts)


def _needs(need: Need) -> str:
    if need in (Need.NOTHING, Need.KEY):
        return str(need)
    return f"role `{need}`"
