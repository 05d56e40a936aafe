"""Writes the table of variants in docs/variants.md from `horner list --json`.

    scripts/variants.py build/horner            prints the page as it should be
    scripts/variants.py build/horner --write    changes the file
"""

import json
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "variants.md"
BEGIN, END = "<!-- made by scripts/variants.py -->", "<!-- end -->"
FORMS = [("fused", "fused_cpu"), ("chunked", "chunked"), ("recurrent", "recurrent")]


def tables(horner):
    listed = json.loads(subprocess.run([horner, "list", "--json"], capture_output=True, text=True, check=True).stdout)
    out, mechanism = [], None
    for v in listed["variants"]:
        if v["mechanism"] != mechanism:
            mechanism = v["mechanism"]
            out += ["", f"### {mechanism[0].upper()}{mechanism[1:]}", ""]
            out += ["| row | also | what it is | from | forms |", "|---|---|---|---|---|"]
        forms = ", ".join(name for name, execution in FORMS if v["executions"][execution] == "yes")
        also = ", ".join(f"`{x}`" for x in v["aliases"].split() if not x.startswith(("gated_softmax", "softmax_", "gated_relu", "gated_ReLU")))
        out.append(f"| `{v['name']}` | {also} | {v['about'].replace('|', chr(92) + '|')} | {v['source']} | {forms or 'reference'} |")
    out += ["", "### Families, for any order n", "", "| row | what it is | from |", "|---|---|---|"]
    out += [f"| `{f['name']}` | {f['about']} | {f['source']} |" for f in listed["families"]]
    return "\n".join(out)


def page(horner):
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{tables(horner)}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    made = page(sys.argv[1])
    PAGE.write_text(made) if "--write" in sys.argv else print(made, end="")
