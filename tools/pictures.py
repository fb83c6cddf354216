"""Draws the pictures of `docs/how`; `--check` draws none, and exits with 1 where one is not up to date."""

import sys
from collections.abc import Callable
from functools import partial

from tools.drawing import BLUE, GREEN, GREY, ORANGE, Drawing
from tools.kept_files import ROOT, main

FOLDER = ROOT / "docs" / "how" / "pictures"


def streaming_prefill() -> Drawing:
    picture = Drawing("Prefill of pages as they are found, against prefill once all are there", 760, 250)
    arrivals = (150, 270, 390, 510)
    picture.words(20, 34, "retriever", bold=True)
    for number, x in enumerate(arrivals, 1):
        picture.box(x - 30, 20, 60, 22, f"page {number}", GREY)
        picture.line(x, 42, x, 215, dashed=True)
    picture.words(20, 94, "waiting", bold=True)
    picture.box(510, 76, 190, 28, "prefill of all pages", BLUE)
    picture.arrow(510, 124, 700, 124)
    picture.words(605, 140, "to the first token", "middle")
    picture.words(20, 184, "streaming", bold=True)
    for x in arrivals:
        picture.box(x, 166, 46, 28, "", BLUE)
    picture.arrow(510, 214, 556, 214)
    picture.words(566, 218, "to the first token")
    picture.words(20, 240, "time goes to the right; the question comes with the last page")
    return picture


def decode_batches() -> Drawing:
    picture = Drawing("A batch in order of arrival against a batch of one prefix", 800, 260)
    colours = {"A": BLUE, "B": ORANGE, "C": GREEN}
    for left, title, batch, waiting in (
        (20, "in order of arrival", "ABCABC", "ABCA"),
        (420, "one prefix at a time", "AAAAAA", "BBCC"),
    ):
        picture.words(left, 26, title, bold=True)
        for row, prefix in enumerate(batch):
            picture.box(left, 40 + 28 * row, 150, 22, f"prefix {prefix}", colours[prefix])
            picture.box(left + 156, 40 + 28 * row, 70, 22, "own", GREY)
        read = len(set(batch))
        picture.words(left + 240, 70, f"{read} prefixes are" if read > 1 else "1 prefix is")
        picture.words(left + 240, 88, "read in every step")
        picture.words(left, 240, "waiting:")
        for at, prefix in enumerate(waiting):
            picture.box(left + 60 + 42 * at, 224, 36, 22, prefix, colours[prefix])
    return picture


def prefix_tiers() -> Drawing:
    picture = Drawing("One tree of prefixes over device and host memory", 820, 280)
    picture.words(20, 28, "on the device", bold=True)
    picture.words(20, 208, "in host memory", bold=True)
    picture.line(20, 180, 800, 180, dashed=True)
    picture.box(140, 44, 150, 30, "system prompt", BLUE)
    picture.box(340, 44, 130, 30, "examples", BLUE)
    picture.box(540, 14, 130, 30, "conversation 1", BLUE)
    picture.box(540, 64, 130, 30, "conversation 2", BLUE)
    picture.box(540, 114, 130, 30, "conversation 3")
    picture.box(340, 220, 130, 30, "examples", ORANGE)
    picture.box(540, 220, 130, 30, "conversation 3", ORANGE)
    picture.arrow(290, 59, 338, 59)
    picture.arrow(470, 54, 538, 30)
    picture.arrow(470, 62, 538, 78)
    picture.arrow(470, 68, 538, 126, dashed=True)
    picture.arrow(470, 235, 538, 235)
    picture.arrow(400, 74, 400, 218, dashed=True)
    picture.words(394, 150, "copied while it is hot", "end")
    picture.arrow(605, 218, 605, 146, dashed=True)
    picture.words(615, 170, "promoted: asked for again")
    picture.arrow(670, 79, 800, 79)
    picture.words(680, 72, "evicted: the")
    picture.words(680, 96, "coldest leaf")
    return picture


def placement() -> Drawing:
    picture = Drawing("What a request is expected to take on each of three workers", 760, 240)
    picture.words(20, 30, "prompt", bold=True)
    for at in range(4):
        picture.box(100 + 40 * at, 14, 36, 22, "", BLUE if at < 3 else GREY)
    picture.words(280, 30, "four chunks; the first three are a prefix that others asked for, too")
    rows = (
        ("prefill-0", 3, 260, 50, "has three, is busy"),
        ("prefill-1", 2, 30, 100, "has two, is nearly idle: chosen"),
        ("prefill-2", 0, 0, 200, "has none, is idle"),
    )
    for row, (name, held, queue, own, said) in enumerate(rows):
        y = 70 + 52 * row
        picture.words(20, y + 18, name, bold=row == 1)
        for at in range(held):
            picture.box(100 + 24 * at, y + 4, 20, 18, "", BLUE)
        if queue:
            picture.box(200, y, queue, 26, "queue" if queue > 40 else "", GREY)
        picture.box(200 + queue, y, own, 26, "prefill", GREEN if row == 1 else ORANGE)
        picture.words(210 + queue + own, y + 18, said)
    picture.words(200, 232, "expected time to the first token goes to the right")
    return picture


def hand_off() -> Drawing:
    picture = Drawing("A hand-off between the pools, and the times within which it is right", 940, 290)
    lanes = {"client": 65, "router": 215, "prefill worker": 450, "decode worker": 640}
    for name, x in lanes.items():
        picture.box(x - 55, 12, 110, 26, name, GREY)
        picture.line(x, 38, x, 280)
    picture.arrow(215, 66, 444, 66, "1 Prefill")
    picture.box(444, 62, 12, 40, "", BLUE)
    picture.arrow(444, 100, 215, 100, "first token, lease")
    picture.arrow(215, 116, 65, 116, "first token")
    picture.words(330, 140, "2 Decode: prompt, first token, lease", "middle")
    picture.arrow(215, 146, 640, 146)
    picture.arrow(450, 180, 634, 180, "3 KV blocks, pulled")
    picture.box(634, 180, 12, 70, "", BLUE)
    picture.words(330, 208, "other tokens", "middle")
    picture.arrow(634, 214, 215, 214)
    picture.arrow(215, 230, 65, 230, "other tokens")
    picture.words(720, 30, "kept at the prefill worker", bold=True)
    picture.box(720, 100, 12, 180, "", GREEN)
    picture.words(740, 270, "the lease ends: the blocks")
    picture.words(740, 284, "may be somebody else's")
    picture.line(700, 190, 752, 190)
    picture.words(758, 186, "the deadline, half of it:")
    picture.words(758, 202, "a pull that is later is")
    picture.words(758, 218, "not used; the prompt is")
    picture.words(758, 234, "computed again")
    return picture


PICTURES: dict[str, Callable[[], Drawing]] = {
    "streaming-prefill.svg": streaming_prefill,
    "decode-batches.svg": decode_batches,
    "prefix-tiers.svg": prefix_tiers,
    "placement.svg": placement,
    "hand-off.svg": hand_off,
}


def svg(draw: Callable[[], Drawing]) -> str:
    return draw().svg()


if __name__ == "__main__":
    sys.exit(main(__doc__, FOLDER, {name: partial(svg, draw) for name, draw in PICTURES.items()}))
