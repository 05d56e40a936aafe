"""The blocks and charts of docs/ that are made from docs/numbers: a function for each (scripts/docs.py)."""

import itertools
import json
import math
import subprocess
import tempfile
import textwrap
from pathlib import Path

T95 = 4.302652729749462  # of Student's t with 2 degrees of freedom: every interval here is of three seeds


class Numbers:
    """The files of numbers, and the reports that horner makes of them."""

    def __init__(self, folder, horner):
        self.folder, self.horner, self.made = Path(folder), horner, {}

    def __call__(self, name):
        return json.loads((self.folder / f"{name}.json").read_text())

    def row(self, name, variant):
        return next(r for r in self(name)["rows"] if r["variant"] == variant)

    def report(self, name):
        """report.json of a file of runs."""
        if name not in self.made:
            with tempfile.TemporaryDirectory() as out:
                subprocess.run([self.horner, "report", self.folder / f"{name}.json", "--out", out], check=True, capture_output=True)
                self.made[name] = json.loads((Path(out) / "report.json").read_text())
        return self.made[name]

    def section(self, name, heading):
        return next(s["content"] for s in self.report(name)["sections"] if s["heading"].startswith(heading))

    def findings(self, name, *words):
        """The sentences of the report that have one of these words; all without words."""
        return [s for s in self.report(name)["summary"] if not words or any(w in s for w in words)]


def p_of(mean, half):
    """Two-sided p of Student's t with 2 degrees of freedom, of three seeds, from half their 95 % interval."""
    if half == 0:
        return 0.0
    t = abs(mean) / (half / T95)
    return 1 - t / math.sqrt(2 + t * t)


def interval(row):
    """Mean and half of the 95 % interval in percent, or None without seeds."""
    if "half" in row:
        return row["mean"], row["half"]
    if "seeds" not in row:
        return None
    x = row["seeds"]
    mean = sum(x) / len(x)
    error = math.sqrt(sum((v - mean) ** 2 for v in x) / (len(x) - 1) / len(x))
    return mean, T95 * error


def holm(p):
    order, out, least = sorted(range(len(p)), key=lambda i: p[i]), [0.0] * len(p), 0.0
    for rank, i in enumerate(order):
        least = max(least, min(1.0, (len(p) - rank) * p[i]))
        out[i] = least
    return out


def signed(x, digits=None):
    digits = (1 if abs(x) < 9.95 else 0) if digits is None else digits
    return ("−" if x < 0 else "+") + f"{abs(x):.{digits}f}"


def wrapped(text):
    return "\n".join(textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False))


def bullets(sentences):
    return "\n".join(textwrap.fill("- " + s, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False) for s in sentences)


def table(head, rows):
    return "\n".join(["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *("| " + " | ".join(r) + " |" for r in rows)])


# The transcribed ablation and order sweep.

def verdicts(rows):
    """{variant: text of mean and interval, whether the interval excludes 0, whether Holm's p is below 0.05}; over all rows with an interval."""
    known = [(r["variant"], *interval(r)) for r in rows if interval(r)]
    corrected = dict(zip((k[0] for k in known), holm([p_of(m, h) for _, m, h in known])))
    out = {r["variant"]: {"text": f"{signed(r['mean'])} %", "apart": None, "shown": None} for r in rows if not interval(r)}
    for variant, mean, half in known:
        text = f"{signed(mean)} % ({signed(mean - half)} to {signed(mean + half)})"
        out[variant] = {"text": text, "apart": abs(mean) > half, "shown": corrected[variant] < 0.05}
    return out


CLAIMS = [  # claim, the file and the variants, what it says about them
    ("the L2 norm gives softmax's loss curve", "paper-small", ["l2"], "equal"),
    ("RMSNorm and LayerNorm do, too", "paper-small", ["rms", "layer_norm"], "equal"),
    ("… without the clamp of scores at 5", "paper-small", ["rms:clamp=inf", "layer_norm:clamp=inf,denominator=nothing"], "equal"),
    ("ten orders of the series reach softmax", "paper-small", ["taylor10"], "equal"),
    ("", "orders", ["taylor10", "centred_taylor10"], "equal"),
    ("few orders do not", "orders", ["taylor1", "taylor2", "taylor3"], "behind"),
    ("", "paper-small", ["taylor2", "taylor4"], "behind"),
    ("linear attention is clearly worse", "paper-small", ["linear_cosine", "linear_relu", "linear_elu"], "behind"),
    ("dividing by the length alone is worse", "paper-small", ["by_count"], "behind"),
    ("gates with a norm do not beat a norm alone", "paper-small", ["gated"], "equal"),
]
SETTINGS = {"paper-small": "A", "orders": "B"}


def verdict(claim, found):
    """In words; found: what verdicts() says of the claim's variants."""
    if any(f["shown"] is None for f in found):
        return "open: no intervals were kept"
    shown, apart = [f["shown"] for f in found], [f["apart"] for f in found]
    if claim == "behind":
        return "holds" if all(shown) else "not shown after correction, though every interval excludes zero" if all(apart) else "not shown"
    return "does not hold" if any(shown) else "no difference shown" + (", though an interval excludes zero before correction" if any(apart) else "")


def first_paper(numbers):
    every = {name: verdicts(numbers(name)["rows"]) for name in SETTINGS}
    rows = []
    for claim, file, variants, kind in CLAIMS:
        found = [every[file][v] for v in variants]
        rows.append([claim, SETTINGS[file], "; ".join(f"`{v}` {f['text']}" for v, f in zip(variants, found)), verdict(kind, found)])
    orders = numbers("paper-small")["dominant_order_of_softmax_by_layer"]
    rows.append(["the dominant order is far above 1 after training", "A", "softmax by layer, means of seeds: " + ", ".join(map(str, orders)), "holds"])
    return table(["claim", "setting", "validation loss against softmax (95 % interval)", "verdict"], rows)


def order_table(numbers):
    of = {r["variant"]: r for r in numbers("orders")["rows"]}

    def cell(name):
        r = of.get(name)
        if not r:
            return "the same row"
        mean = f"{abs(r['mean']):.1f}" if abs(r["mean"]) < 9.95 else f"{abs(r['mean']):.0f}"
        sign = "" if r["mean"] == 0 else "−" if r["mean"] < 0 else "+"
        seeds = ", ".join("0" if s == 0 else signed(s, 0) for s in r.get("seeds", []))
        return f"{sign}{mean} % ± {r['half']}" + (f" ({seeds})" if seeds else "")

    rows = [[str(n), cell(f"taylor{n}"), cell(f"centred_taylor{n}"), cell(f"raw_taylor{n}")] for n in range(1, 11)]
    return table(["order", "plain", "about the row's mean score", "plain, without a floor"], rows)


def order_text(numbers):
    rows = numbers("orders")["rows"]
    found = verdicts(rows)
    shown = [v for v, f in found.items() if f["shown"]]
    names = {"taylor": "plain", "centred_taylor": "centred", "raw_taylor": "without a floor"}
    parts = []
    for family, name in names.items():
        orders = [str(r["order"]) for r in rows if r["variant"] == f"{family}{r['order']}" and r["variant"] in shown]
        parts.append(f"{name} {', '.join(orders) if orders else 'none'}")
    zero = [r["order"] for r in rows if r["variant"].startswith("taylor") and r["order"] % 2 == 0 and r["mean"] - r["half"] < 0]
    return wrapped(
        f"By Holm's correction over the {len(found)} comparisons of this table, these orders are shown to be behind softmax: {'; '.join(parts)}. No order is "
        f"shown to be ahead. Of the even plain orders the interval contains zero from order {min(zero)} on."
    )


def section(heading, text, content):
    return {"heading": heading, "text": text, "half": False, "content": content}


def report(title, *sections):
    return {"title": title, "subtitle": "", "summary": [], "sections": list(sections), "footer": ""}


def ablation_chart(numbers):
    rows = sorted(numbers("paper-small")["rows"], key=lambda r: interval(r)[0] if interval(r) else r["mean"])
    with_interval = [interval(r) for r in rows]
    series = [
        {"name": "three seeds, 95 % interval", "values": [i and round(i[0], 2) for i in with_interval], "spread": [i and round(i[1], 2) for i in with_interval]},
        {"name": "the mean alone was kept", "values": [None if i else r["mean"] for i, r in zip(with_interval, rows)]},
    ]
    chart = {"kind": "bars", "label": "validation loss against softmax, percent", "dots": True, "categories": [r["variant"] for r in rows], "series": series}
    return report("The ablation", section("Validation loss against softmax", "Percent of softmax's loss of the same seed; setting A.", chart))


def orders_chart(numbers):
    d, series = numbers("orders"), []
    for family, name in {"taylor": "plain, with a floor", "raw_taylor": "plain, without", "centred_taylor": "centred"}.items():
        rows = [r for r in d["rows"] if r["variant"] == f"{family}{r['order']}"]
        points = [[r["order"], round(d["softmax"]["mean"] * (1 + r["mean"] / 100), 3)] for r in rows]
        spread = [round(d["softmax"]["mean"] * r["half"] / 100, 3) if r["half"] < 80 else 0 for r in rows]
        series.append({"name": name, "points": points, "spread": spread})
    series.insert(0, {"name": "softmax", "dashed": True, "strong": True, "points": [[1, d["softmax"]["mean"]], [10, d["softmax"]["mean"]]]})
    chart = {"kind": "lines", "x_label": "order of the series", "y_label": "validation loss", "log_x": False, "log_y": True, "smooth": False, "series": series}
    return report("Orders", section("Validation loss against the order", "Means of three seeds with 95 % intervals of the difference from softmax, where they are below 80\u00a0%; setting B.", chart))


# State tracking.

def digits(x, deviation):
    return f"{x:.4f}" if 0.9995 <= x < 1 else f"{x:.3f}"


def state_tracking(numbers):
    d, rows, last = numbers("state-tracking"), [], None
    beta = {"delta": ", β in (0, 1)", "delta_negative": ", β in (0, 2)"}
    for r in d["rows"]:
        title = "" if r["task"] == last else f"{'S3' if r['task'] == 's3' else r['task']} (guessing: {d['guessing'][r['task']]:.3f})"
        last = r["task"]
        cells = [f"{digits(a['mean'], 0)} ± {a['deviation']:.4f}" if a["mean"] >= 0.9999 and a["mean"] < 1 else f"{digits(a['mean'], 0)} ± {a['deviation']:.3f}" for a in r["lengths"]]
        cells[2] += f" ({digits(r['lengths'][2]['least'], 0)})"
        rows.append([title, f"`{r['variant']}`" + beta.get(r["variant"], ""), *cells, f"{r['solved']} of {r['seeds']}"])
    made = table(["task", "variant", "64 tokens", "128", "256", "solved"], rows)
    parity, s3 = (next(r for r in d["rows"] if r["task"] == t and r["variant"] == "delta_negative") for t in ("parity", "s3"))
    learned = [r for r in d["rows"] if r["lengths"][0]["mean"] > 0.99]
    only = "`delta_negative` is the only variant that learns either task at the length of training." if {r["variant"] for r in learned} == {"delta_negative"} else ""
    other = " and ".join(f"{x:.3f}" for x in s3["others_at_all_rates"])
    text = (
        f"{only} {['None', 'One', 'Two', 'Three'][parity['seeds'] - parity['solved']]} of its three reported parity runs fails the criterion: the losses at 64 tokens are all near 0, "
        "so the rule that chooses the rate does not see how far a model generalises. "
        f"Of all rates, {parity['solved_at_all_rates']} of its {parity['runs_at_all_rates']} runs solve parity and {s3['solved_at_all_rates']} of {s3['runs_at_all_rates']} solve S3; the other two reach {other}."
    )
    return made + "\n\n" + wrapped(text)


def state_tracking_chart(numbers):
    d, out = numbers("state-tracking"), []
    for task in ("parity", "s3"):
        series = [{"name": r["variant"], "strong": r["variant"] == "softmax", "points": [[a["length"], a["mean"]] for a in r["lengths"]],
                   "spread": [a["deviation"] for a in r["lengths"]]} for r in d["rows"] if r["task"] == task]  # fmt: skip
        series.append({"name": "guessing", "dashed": True, "points": [[64, d["guessing"][task]], [256, d["guessing"][task]]]})
        chart = {"kind": "lines", "x_label": "tokens", "y_label": "right answers", "log_x": True, "log_y": False, "smooth": False, "series": series}
        s = section("S3" if task == "s3" else "Parity", "Trained with 64 tokens; means and standard deviations of three seeds.", chart)
        out.append({**s, "half": True})
    return report("State tracking", *out)


# Files of runs.

def chosen_runs(numbers, name):
    """{variant: {seed: run}} of the reported rates, with the settings of all runs filled in."""
    d = numbers(name)
    runs = [{**r, "settings": {**d["settings"], **r["settings"]}} for r in d["runs"] if r["result"]]
    by = {}
    for r in runs:
        by.setdefault(r["settings"]["attention"], {}).setdefault(r["settings"].get("learning-rate"), {})[r["settings"].get("seed", 0)] = r
    mean = lambda seeds: sum(r["result"]["validation_loss"] for r in seeds.values()) / len(seeds)
    return {v: min(rates.values(), key=lambda seeds: (-len(seeds), mean(seeds))) for v, rates in by.items()}


def paired(a, b, value):
    """Mean and 95 % interval of the differences of three runs each, with the same seeds."""
    x = [value(a[s]["result"]) - value(b[s]["result"]) for s in sorted(a)]
    mean, half = interval({"seeds": x})
    return mean, mean - half, mean + half


def ablation_rows(numbers, name, columns):
    content = numbers.section(name, "The ablation")
    at = [[c["name"] for c in content["columns"]].index(c) for c in columns]
    text = lambda cell: cell if isinstance(cell, str) else cell["text"]
    return [[text(row[i]) for i in at] for row in content["rows"]]


def quick(numbers):
    d = numbers("quick")
    seconds = sum(r["result"]["seconds"] for r in d["runs"] if r["result"])
    steps = sum(r["step"] for r in d["runs"])
    tasks = len({r["settings"].get("task", d["settings"].get("task")) for r in d["runs"]})
    return wrapped(
        f"(`horner study quick`: {len(d['runs'])} runs on {tasks} tasks, {steps:,} steps that took {seconds / 60:.1f} minutes in all, one thread each, beside other work on 2 cores "
        "of an AMD EPYC; on a quiet machine the study takes 2 min 36 s.)"
    )


def recall_state(numbers):
    rows = ablation_rows(numbers, "recall-state", ["variant", "accuracy", "against softmax", "validation loss", "seeds", "state, bytes", "weights"])
    made = table(["variant", "right answers", "against softmax, points", "loss", "seeds", "state, bytes", "weights"], [[f"`{r[0]}`", *r[1:]] for r in rows])
    by = chosen_runs(numbers, "recall-state")
    asked = list(itertools.combinations(["delta_taylor2", "taylor2", "gated_delta", "softmax"], 2))  # all pairs: nothing is chosen
    found = [paired(by[a], by[b], lambda r: 100 * r["validation_accuracy"]) for a, b in asked]
    corrected = holm([p_of(mean, high - mean) for mean, _, high in found])
    parts = []
    for (a, b), (mean, low, high), p in zip(asked, found, corrected):
        word = "not shown to differ" if p >= 0.05 else "ahead" if mean > 0 else "behind"
        if b != "softmax":
            parts.append(f"`{a}` against `{b}` {signed(mean, 1)} points ({signed(low, 1)} to {signed(high, 1)}), {word} (p = {p:.2g})")
    text = f"Right answers paired by seed, p by Holm's correction over all {len(asked)} pairs of variants: " + "; ".join(parts) + "."
    return made + "\n\n" + wrapped(text) + "\n\n" + bullets(numbers.findings("recall-state", "Multi-query"))


def normalisers(numbers):
    content = numbers.section("normalisers-small", "What the heads select")
    names = [c["name"] for c in content["columns"]]
    text = lambda cell: cell if isinstance(cell, str) else cell["text"]
    keep = [i for i, n in enumerate(names) if n != "task"]
    rows = [[f"`{row[0]}`", *(text(row[i]) for i in keep[1:])] for row in content["rows"]]
    return table([names[i] for i in keep], rows) + "\n\n" + bullets(numbers.findings("normalisers-small"))


def second_paper(numbers):
    d = numbers("diagnosis")
    rows = [[r["claim"], r["found"], r["verdict"]] for r in d["rows"]]
    return table(["claim", "found", "verdict"], rows)


BLOCKS = {
    "first-paper": first_paper,
    "orders": lambda n: order_table(n) + "\n\n" + order_text(n),
    "state-tracking": state_tracking,
    "quick": quick,
    "recall-state": recall_state,
    "normalisers": normalisers,
    "second-paper": second_paper,
}
