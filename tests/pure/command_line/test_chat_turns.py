"""What a chat's prompt is made of."""

from command_line.chat_turns import Turns


def test_a_chat_is_all_that_was_said() -> None:
    turns = Turns(system="Be short.")
    turns.answered("one?", "1")
    turns.answered("two?", "2")
    assert [(turn["role"], turn["content"]) for turn in turns.prompt("three?")] == [
        ("system", "Be short."),
        ("user", "one?"),
        ("assistant", "1"),
        ("user", "two?"),
        ("assistant", "2"),
        ("user", "three?"),
    ]


def test_pages_come_before_the_message_that_closes_their_turn() -> None:
    turns = Turns()
    assert [turns.add_page("a page\n"), turns.add_page("another")] == ["a page\n\n", "another\n\n"]
    assert turns.open_prefix() == [{"role": "user", "content": ""}]
    assert turns.opened == "a page\n\nanother\n\n"
    turns.answered("what?", "that")
    assert turns.prompt("and?")[0]["content"] == "a page\n\nanother\n\nwhat?"
    assert turns.prompt("and?")[-1]["content"] == "and?"


def test_what_is_forgotten_leaves_what_comes_before_everything() -> None:
    turns = Turns(system="Be short.")
    turns.answered("one?", "1")
    turns.add_page("a page")
    turns.reset()
    assert turns.prompt("two?") == [{"role": "system", "content": "Be short."}, {"role": "user", "content": "two?"}]


def test_what_comes_before_everything_may_change_in_between() -> None:
    turns = Turns(system="Be short.")
    turns.answered("one?", "1")
    turns.system = ""
    turns.answered("two?", "2")
    turns.system = "Be long."
    assert [turn["content"] for turn in turns.prompt("three?")] == ["Be long.", "one?", "1", "two?", "2", "three?"]
