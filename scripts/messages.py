"""Every error message of the program, collected from its sources: python scripts/messages.py [words] > messages.txt

One line each, "file:line: text", with ‹expressions› where values go. With words, only the messages that contain one of them.
"""

import re
import sys
from pathlib import Path

SOURCES = Path(__file__).resolve().parent.parent / "src"
CALL = re.compile(r"\b(?:horner::)?(fail|check)\(")
LITERAL = re.compile(r'"((?:[^"\\]|\\.)*)"')


def arguments(text, at):
    """The arguments of the call whose parenthesis opens before `at`, or none if it does not close."""
    depth, start, out = 0, at, []
    while at < len(text):
        c = text[at]
        if c == '"':
            at = LITERAL.match(text, at).end()
            continue
        if c == "'" and not text[at - 1].isalnum():  # a character, not a separator of digits
            at = text.index("'", at + (3 if text[at + 1] == "\\" else 2)) + 1
            continue
        if c in "([{":
            depth += 1
        elif c in ")]}":
            if depth == 0:
                return [*out, text[start:at]]
            depth -= 1
        elif c == "," and depth == 0:
            out.append(text[start:at])
            start = at + 1
        at += 1
    return []


def words(argument):
    """An argument as text: literals as they are, expressions in brackets."""
    rest = LITERAL.sub("", argument).strip()
    if not rest:
        return "".join(LITERAL.findall(argument))
    return "‹" + " ".join(argument.split()) + "›"


def messages():
    for path in sorted(SOURCES.rglob("*")):
        if path.suffix not in (".cpp", ".h"):
            continue
        code = "\n".join("" if line.lstrip().startswith("//") else line for line in path.read_text().split("\n"))
        for call in CALL.finditer(code):
            given = arguments(code, call.end())[call[1] == "check" :]
            text = "".join(map(words, given)).replace('\\"', '"')
            if re.search("[a-z]{3}", re.sub("‹.*?›", "", text)):
                yield f"src/{path.relative_to(SOURCES)}:{code[: call.start()].count(chr(10)) + 1}", text


def main():
    for place, text in messages():
        if len(sys.argv) < 2 or any(word in text for word in sys.argv[1:]):
            print(f"{place}: {text}")


if __name__ == "__main__":
    main()
