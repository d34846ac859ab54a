"""Text for people."""

from hyper_parallel._text import byte_words, first_line, near_hint, near_names, printable, shortened


def test_the_first_line_of_an_error_is_taken():
    """What follows the first line, such as PyTorch's C++ stack, is dropped; an empty text has an empty line."""
    assert first_line(ValueError("no such axis\nException raised from here")) == "no such axis"
    assert first_line("one line") == "one line"
    assert first_line("") == ""


def test_a_number_of_bytes_has_a_unit():
    """Three digits, in the largest unit of which it is at least one."""
    texts = [byte_words(count) for count in (0, 1000, 1024, 2247, 3 * 2**29, 120 << 20, 2**70)]
    assert texts == ["0 B", "1000 B", "1.00 KiB", "2.19 KiB", "1.50 GiB", "120 MiB", "1048576 PiB"]


def test_control_characters_are_escaped():
    """A text that others wrote cannot steer the terminal; letters of other languages stay, and what is kept."""
    assert printable("a\x1b[2J\n\té\u202e") == "a\\x1b[2J\\n\\té\\u202e"
    assert printable("a\n\tb\x07", keep="\n\t") == "a\n\tb\\x07"


def test_names_that_were_probably_meant():
    """The nearest come first, as many as asked for; a message without any has no hint."""
    known = ["linear", "bilinear", "matmul"]
    assert near_names("lineer", known) == ["linear", "bilinear"]
    assert near_names("lineer", known, 1) == ["linear"]
    assert near_hint("lineer", known) == "; did you mean linear or bilinear?"
    assert near_hint("xyz", known, 0.9) == ""


def test_a_long_list_of_names_is_shortened():
    """A message lists a few names and says how many more there are."""
    assert shortened(["a", "b", "c"], 3) == "a, b, c"
    assert shortened(["a", "b", "c"], 2) == "a, b and 1 more"
