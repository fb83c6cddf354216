"""What is wrong with a text that is no YAML, and where: without a word of it, as it may hold a password. Pure."""

import re

import yaml

# Of what the parser quotes a single character and names such as <block end> are its own; all else is the text's.
_QUOTED = re.compile(r""" (['"])(?!<)(?!.\1).*""", re.DOTALL)


def yaml_complaint(error: yaml.YAMLError | ValueError | RecursionError) -> str:
    """The predicate of a sentence on the text. A ValueError is raised for a number or a date that there is not."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        problem = _QUOTED.sub("", error.problem or "not understood")
        return f"is not valid YAML: line {mark.line + 1}, column {mark.column + 1}: {problem}"
    if isinstance(error, yaml.reader.ReaderError):
        return f"is not valid YAML: character {error.position + 1}: {error.reason}"
    if isinstance(error, RecursionError):
        return "is not valid YAML: it is nested too deeply"
    return "is not valid YAML: there is no such number or date"
