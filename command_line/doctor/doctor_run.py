"""`rachis doctor`: sees the service, has the checks judge it, and tells what was found."""

from dataclasses import asdict

import grpc
from rich.markup import escape

from command_line.doctor import collecting
from command_line.doctor.checks import CHECKS
from command_line.doctor.findings import Report, examine
from command_line.doctor.seen import Seen
from command_line.errors import USAGE_EXIT_CODE, report_error
from command_line.output import out, print_json

_FOUND = 1
_MARGIN = " " * 10


async def doctor(address: str, *, as_json: bool) -> int:
    """Returns 0 where nothing was found, 1 with findings, 2 where the router cannot be asked."""
    try:
        seen = await collecting.look(address)
    except grpc.aio.AioRpcError as error:
        report_error(error)
        return USAGE_EXIT_CODE
    report = examine(CHECKS, seen)
    if as_json:
        print_json(
            {
                "address": address,
                "service_id": seen.router.service_id,
                "findings": [asdict(finding) for finding in report.findings],
                "not_checked": [asdict(each) for each in report.not_checked],
                "checks": len(CHECKS),
            }
        )
    else:
        _print(address, seen, report)
    return _FOUND if report.findings else 0


def _print(address: str, seen: Seen, report: Report) -> None:
    for finding in report.findings:
        out.print(f"[bold]{finding.severity:<9}[/bold] {escape(finding.sentence)}")
        out.print(f"{_MARGIN}{finding.runbook}")
    if report.not_checked:
        out.print("not checked:")
        width = max(len(each.check) for each in report.not_checked)
        for each in report.not_checked:
            out.print(f"  {each.check:<{width}}  {escape(each.why)}")
    number = len(report.findings)
    found = f"{number} finding{'s' if number > 1 else ''}" if number else "nothing is wrong"
    out.print(
        f"service {seen.router.service_id} on {address}: {found}; {len(CHECKS)} checks, "
        f"{len({each.check for each in report.not_checked})} of them not made"
    )
