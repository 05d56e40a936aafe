"""Runs the cells of a notebook in their folder and stores what they print. Needs no Jupyter.

    python scripts/notebook.py examples/swap_train_diagnose.ipynb
"""

import ast
import contextlib
import io
import json
import os
import sys
from pathlib import Path


def run_cell(code, names):
    """What Jupyter would store: the printed text, and the value of the last line if it is an expression."""
    tree, said, value = ast.parse(code), io.StringIO(), None
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(said):
        exec(compile(tree, "cell", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    outputs = []
    if said.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": said.getvalue().splitlines(keepends=True)})
    if value is not None:
        data = {"text/plain": [repr(value)]}
        if hasattr(value, "_repr_svg_"):
            data["image/svg+xml"] = value._repr_svg_().splitlines(keepends=True)
        outputs.append({"output_type": "execute_result", "execution_count": None, "metadata": {}, "data": data})
    return outputs


def run(path):
    """The notebook with the outputs of this run."""
    notebook, names = json.loads(Path(path).read_text()), {"__name__": "__main__"}
    here = os.getcwd()
    os.chdir(Path(path).parent)
    try:
        for number, cell in enumerate((c for c in notebook["cells"] if c["cell_type"] == "code"), 1):
            cell["outputs"], cell["execution_count"] = run_cell("".join(cell["source"]), names), number
            for output in cell["outputs"]:
                if "execution_count" in output:
                    output["execution_count"] = number
    finally:
        os.chdir(here)
    return notebook


if __name__ == "__main__":
    for path in sys.argv[1:]:
        Path(path).write_text(json.dumps(run(path), indent=1, ensure_ascii=False) + "\n")
