"""The measurement of copies to host memory, small: that it measures, not what."""

from benchmarks import host_copies


def test_every_shape_is_measured_and_the_ratios_are_of_an_8b_model() -> None:
    found = host_copies.measure(1, 1, lambda _: None)

    assert [(each.block_bytes, each.layers) for each in found] == list(host_copies.SHAPES)
    assert all(speed > 0 for each in found for speed in each.gb_per_s.values())
    (reported,) = (each for each in found if (each.block_bytes, each.layers) == host_copies.REPORTED)
    speeds, result = reported.gb_per_s, host_copies.table(found)
    assert result["out_of_memcpy"] == round(speeds["out"] / speeds["memmove"], 3)
    assert result["back_of_memcpy"] == round(speeds["back"] / speeds["memmove"], 3)
