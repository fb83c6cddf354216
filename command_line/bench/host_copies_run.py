"""`rachis bench host-copies`: how fast KV blocks are copied between device and host memory."""

from benchmarks import host_copies
from command_line.output import err, out, print_json, print_table


def bench_host_copies(copied_bytes: int, rounds: int, *, as_json: bool) -> None:
    found = host_copies.measure(copied_bytes, rounds, err.print)
    result = host_copies.table(found)
    if as_json:
        print_json(result)
        return
    print_table(
        "GB/s", ("bytes of a block, layers", "out", "back", "a row at a time", "memmove"),
        [
            (f"{each.block_bytes:,} x {each.layers}", *(f"{speed:.2f}" for speed in each.gb_per_s.values()))
            for each in found
        ],
    )  # fmt: skip
    out.print(
        f"with the blocks of an 8B model {result['out_of_memcpy']:.2f} of memmove out and "
        f"{result['back_of_memcpy']:.2f} back"
    )
