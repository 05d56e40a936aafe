"""horner.nn: a block holds the weights of a layer of `horner train`, under the same names, and computes the same."""

import inspect
import math
import os
import subprocess

import pytest
import torch
from safetensors.torch import load_file, save_file

import horner
import horner.nn

TOOL = os.path.join(os.path.dirname(os.environ["HORNER"]), "model_tool")


def run(*arguments):
    done = subprocess.run([TOOL, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


class Llama(torch.nn.Module):
    """The model `tiny` made of blocks."""

    def __init__(self, variant="softmax"):
        super().__init__()
        variants = horner.nn.variants_of_layers(variant, 2)
        self.model = torch.nn.Module()
        self.model.embed_tokens = torch.nn.Embedding(256, 64)
        self.model.layers = torch.nn.ModuleList(horner.nn.TransformerBlock(64, 4, hidden=128, variant=v) for v in variants)
        self.model.norm = torch.nn.RMSNorm(64, eps=1e-5)
        self.lm_head = torch.nn.Linear(64, 256, bias=False)

    def forward(self, tokens):
        x = self.model.embed_tokens(tokens)
        for block in self.model.layers:
            x = block(x)
        return self.lm_head(self.model.norm(x))


def kinds():
    """One variant of each set of weights; with HORNER_LONG=1, all of them. Without those whose inputs a model does not make."""
    sets = {}
    made = [name for name in horner.variants() if not {"bias", "prefix"} & set(horner.describe(name)["inputs"].split())]
    for name in made:
        sets.setdefault((horner.describe(name)["inputs"], *torch.ops.horner.around(name).values()), []).append(name)
    return made if os.environ.get("HORNER_LONG") else [names[0] for names in sets.values()]


def test_every_variant_is_a_layer_of_the_command(tmp_path):
    tokens = torch.randint(0, 256, (2, 21), generator=torch.Generator().manual_seed(5))
    for variant in [*kinds(), "gated_decay,linear_mamba", "taylor2:norm=l2,post_gate,softmax",
                    "softmax|lolcats:features=hedgehog(8),near=window(5)^2|softmax:mask=window(4)+gated_delta"]:  # fmt: skip
        run("new", "tiny", variant, 3, tmp_path / "model")
        model = Llama(variant=variant)
        weights = load_file(tmp_path / "model/model.safetensors")
        assert {k: v.shape for k, v in model.state_dict().items()} == {k: v.shape for k, v in weights.items()}, variant
        model.load_state_dict(weights)
        loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        save_file({"tokens": tokens}, tmp_path / "tokens.safetensors")
        run("loss", tmp_path / "model", tmp_path / "tokens.safetensors", tmp_path / "out.safetensors")
        theirs = load_file(tmp_path / "out.safetensors")
        assert abs(loss.item() - theirs.pop("loss").item()) < 1e-4, variant
        ours = dict(model.named_parameters())
        assert ours.keys() == theirs.keys(), variant
        for name, gradient in theirs.items():
            found = ours[name].grad
            assert (found - gradient).norm() < 2e-3 * gradient.norm() + 1e-7, f"{variant}: {name}"


def test_a_pattern_repeats_over_the_layers():
    of = horner.nn.variants_of_layers
    assert of("softmax", 2) == ["softmax"] * 2
    assert of("linear_decay*3,softmax", 6) == ["linear_decay"] * 3 + ["softmax"] + ["linear_decay"] * 2
    assert of(["taylor2:norm=rms(eps=1e-3),centred", "softmax*2"], 3) == ["taylor2:norm=rms(eps=1e-3),centred", "softmax", "softmax"]
    assert of("taylor2:norm=rms(eps=1e-3),no_centred,l2,taylor4:norm=l2*2", 4)[1:] == ["l2", "taylor4:norm=l2", "taylor4:norm=l2"]
    for wrong in ("softmax*0", "softmax*٣", "softmax*³", "softmax*+3", "softmax*10001", "softmax*x", "*2", "softmax,", "softmax*3,l2", []):
        with pytest.raises(ValueError, match="a pattern looks like|may be shorter, not longer"):
            of(wrong, 3)


@pytest.mark.parametrize("variant", ["softmax", "gated_decay", "based", "linear_mamba", "gated_conv"])
def test_groups_masks_and_training(variant):
    torch.manual_seed(0)
    block = horner.nn.TransformerBlock(48, 6, variant=variant, kv_heads=2, head_dim=16)
    x = torch.randn(2, 12, 48)
    keep = torch.ones(2, 12, dtype=torch.bool)
    keep[0, :4] = False
    whole = block(x)
    assert whole.shape == x.shape
    hidden = block(x, keep=keep)
    torch.testing.assert_close(hidden[1], whole[1])
    if block.self_attn.rope_theta is None:  # padding counts as nothing, and other positions as the same
        torch.testing.assert_close(hidden[0, 4:], block(x[:1, 4:])[0], atol=1e-4, rtol=1e-4)
    packed = block(torch.cat([x[:1], x[1:]], 1), cu_seqlens=torch.tensor([0, 12, 24]))
    torch.testing.assert_close(packed[0, 12:], whole[1], atol=1e-4, rtol=1e-4)
    optimizer = torch.optim.AdamW(block.parameters(), 3e-3)
    first = None
    for _ in range(40):
        loss = (block(x) - x.roll(1, 1)).square().mean()
        first = first or loss.item()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.7 * first


def test_wrong_arguments_and_saving(tmp_path):
    for arguments, message in (
        ({"dim": 50, "heads": 4}, "dim must be a multiple of heads"),
        ({"dim": 64, "heads": 4, "kv_heads": 3}, "heads must be a multiple of kv_heads"),
        ({"dim": 12, "heads": 4}, "even head_dim"),
        ({"dim": 64, "heads": 4, "variant": "sofmax"}, "did you mean 'softmax'"),
        ({"dim": 64, "heads": 0}, "heads must be 1 to 2147483647, got 0"),
        ({"dim": 64, "heads": 4, "kv_heads": 0}, "kv_heads must be 1 to 2147483647, got 0"),
        ({"dim": 64, "heads": 4, "kv_heads": -2}, "kv_heads must be 1 to 2147483647, got -2"),
        ({"dim": 64, "heads": 4, "variant": None}, "variant must be a str, got None"),
        ({"dim": 64, "heads": 4, "mask": torch.ones(5, 5) > 0}, "mask must be the name of a mask, got Tensor"),
        ({"dim": 64, "heads": 4, "execution": "x"}, "no execution 'x'; possible: 'auto', "),
        ({"dim": 64, "heads": 4, "dropout": 2.0}, "dropout must be 0 to 0.999, not 2"),
        ({"dim": 64, "heads": 4, "dropout": None}, "dropout must be a number, got None"),
        ({"dim": -8, "heads": 4}, "dim must be 1 to 2147483647, got -8"),
        ({"dim": "64", "heads": 4}, "dim must be an int, got str"),
        ({"dim": 64, "heads": 4, "short_conv": -1}, "short_conv must be 1 to 2147483647, got -1"),
    ):
        for module in (horner.nn.Attention, horner.nn.TransformerBlock):
            with pytest.raises((ValueError, RuntimeError, TypeError), match=message):
                module(**arguments)
    for arguments, message in (
        ({"hidden": -5}, "hidden must be 1 to 2147483647, got -5"),
        ({"hidden": 0}, "hidden must be 1 to 2147483647, got 0"),
        ({"hidden": 1.5}, "hidden must be an int, got float"),
        ({"eps": -1}, "eps must be a number from 0 on, got -1"),
        ({"eps": math.nan}, "eps must be a number from 0 on, got nan"),
        ({"eps": "small"}, "eps must be a number, got str"),
    ):
        with pytest.raises((ValueError, RuntimeError, TypeError), match=message):
            horner.nn.TransformerBlock(64, 4, **arguments)
    for module in (horner.nn.Attention(64, 4), horner.nn.TransformerBlock(64, 4, variant="gated_conv")):
        for x, keep, message in (
            (torch.ones(5, 64), None, r"x must be a tensor \[B, T, 64\], got \[5, 64\]"),
            (torch.ones(2, 5, 64), torch.ones(2, 5), r"keep must be a tensor \[2, 5\] of torch.bool, .*, got \[2, 5\] torch.float32"),
        ):
            with pytest.raises(ValueError, match=message):
                module(x, keep=keep)
        for name in ("keep", "cu_seqlens", "bias", "prefix"):
            with pytest.raises(TypeError, match=f"{name} must be a torch.Tensor, got list"):
                module(torch.ones(1, 5, 64), **{name: [0, 5]})
        for cuts in (torch.tensor(5), torch.tensor([5]), torch.tensor([[0, 5]]), torch.tensor([0.0, 5.0]), torch.tensor([False, True])):
            with pytest.raises(ValueError, match=r"cu_seqlens must be a tensor \[n\] of int32 or int64, 0 and the end of each sequence, got \["):
                module(torch.ones(1, 5, 64), cu_seqlens=cuts)
    with pytest.raises(TypeError, match="bias must be a torch.Tensor, got list"):
        horner.nn.Attention(64, 4, variant="softmax^2|bias^2")(torch.ones(1, 5, 64), bias=[0.0])
    for wrong, message in (([], r"a pattern looks like .*; \[\] has no layer"), (5, "must be a str or a list of str, got int")):
        with pytest.raises((ValueError, TypeError), match=message):
            horner.nn.variants_of_layers(wrong, 3)
    one = horner.nn.Attention(64, 4, variant="ssmax", dtype=torch.float64)
    torch.save(one, tmp_path / "one.pt")
    again = torch.load(tmp_path / "one.pt", weights_only=False)
    x = torch.randn(1, 9, 64, dtype=torch.float64)
    assert torch.equal(again(x), one(x)) and "variant='ssmax'" in repr(one)
    with torch.autocast("cpu", torch.bfloat16):
        assert horner.nn.TransformerBlock(64, 4, variant="gated_decay")(torch.randn(1, 9, 64)).isfinite().all()


@torch.no_grad()
def test_inputs_go_to_the_parts_that_take_them():
    torch.manual_seed(0)
    x, bias, prefix = torch.randn(2, 9, 64), torch.randn(1, 4, 9, 9), torch.tensor([4, 2])
    mixed = horner.nn.Attention(64, 4, variant="softmax^2|bias|prefix_lm")
    mixed.o_proj.weight.copy_(torch.eye(64))
    heads = mixed(x, bias=bias, prefix=prefix).chunk(4, -1)
    for name, given, where in (("softmax", {}, (0, 1)), ("bias", {"bias": bias}, (2,)), ("prefix_lm", {"prefix": prefix}, (3,))):
        alone = horner.nn.Attention(64, 4, variant=name)
        alone.load_state_dict({k: y for k, y in mixed.state_dict().items() if "horner" not in k}, strict=False)
        wanted = alone(x, **given).chunk(4, -1)
        for h in where:
            torch.testing.assert_close(heads[h], wanted[h])
    for name, given in (("bias", bias), ("prefix", prefix)):
        with pytest.raises(RuntimeError, match=f"input '{name}' was given, but variant 'softmax' does not use it"):
            horner.nn.Attention(64, 4, variant="softmax^2|l2^2")(x, **{name: given})


def test_every_variant_trains_inside_transformers(tmp_path):
    """A folder of the command opens there with its gates and norms, computes the same, and is saved and opened again."""
    transformers = pytest.importorskip("transformers")
    import horner.hf  # noqa: F401

    transformers.logging.set_verbosity_error()
    tokens = torch.randint(0, 256, (2, 21), generator=torch.Generator().manual_seed(5))
    some = kinds() if os.environ.get("HORNER_LONG") else ["gated_decay", "rms", "ssmax", "based", "retention", "cumulative_gate", "linear_cosine", "gated_conv",
                                                            "forgetting", "gated_delta", "kda", "hgrn2", "linear_mamba", "gated_decay@code", "linear_mamba,gated"]  # fmt: skip
    for variant in some:
        run("new", "tiny", variant, 3, tmp_path / "model")
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="horner")
        save_file({"tokens": tokens}, tmp_path / "tokens.safetensors")
        run("loss", tmp_path / "model", tmp_path / "tokens.safetensors", tmp_path / "out.safetensors")
        theirs = load_file(tmp_path / "out.safetensors")
        logits = model(tokens[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        assert abs(loss.item() - theirs.pop("loss").item()) < 1e-4, variant
        ours = dict(model.named_parameters())
        assert ours.keys() == theirs.keys(), variant
        for name, gradient in theirs.items():
            assert (ours[name].grad - gradient).norm() < 2e-3 * gradient.norm() + 1e-7, f"{variant}: {name}"
    model.save_pretrained(tmp_path / "again")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again", attn_implementation="horner")
    assert torch.equal(again(tokens[:, :-1], use_cache=False).logits, logits)


def test_new_weights_in_a_model_of_transformers():
    transformers = pytest.importorskip("transformers")
    import horner.hf

    config = transformers.LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                                      num_key_value_heads=2, vocab_size=99, pad_token_id=0, bos_token_id=1, eos_token_id=2)  # fmt: skip
    tokens = torch.randint(3, 99, (2, 12), generator=torch.Generator().manual_seed(5))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    plain = model(tokens).logits
    model.set_attn_implementation("horner:gated_decay")
    own = [name for name, _ in model.named_parameters() if ".horner." in name]
    assert len(own) == 2 * 8 and config.horner_variant == "gated_decay"
    whole = model(tokens, use_cache=False).logits
    # padding, packing, decoding
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.long), tokens], 1)
    mask = (padded != 0).long()
    left = model(padded, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0), use_cache=False).logits[:, 3:]
    torch.testing.assert_close(left, whole, atol=1e-4, rtol=1e-3)
    ids = torch.arange(12).repeat(2)[None]
    packed = model(tokens.view(1, -1), position_ids=ids, use_cache=False).logits
    torch.testing.assert_close(packed.view(2, 12, -1), whole, atol=1e-4, rtol=1e-3)
    cache = horner.hf.RecurrentCache(model.config)
    with torch.no_grad():
        parts = [model(tokens[:, a:b], past_key_values=cache).logits for a, b in ((0, 7), (7, 8), (8, 12))]
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-4, rtol=1e-3)
    with pytest.raises(NotImplementedError, match="gates of its keys"):
        model.generate(tokens, max_new_tokens=3, do_sample=False)
    model.set_attn_implementation("horner:ssmax")
    assert len([name for name, _ in model.named_parameters() if ".horner." in name]) == 2
    assert model.generate(tokens, max_new_tokens=3, do_sample=False).shape[1] <= 15
    model.set_attn_implementation("horner:softmax")
    assert not [name for name, _ in model.named_parameters() if ".horner." in name]
    torch.testing.assert_close(model(tokens).logits, plain, atol=1e-4, rtol=1e-3)
    model.set_attn_implementation("horner:linear_mamba")  # takes the projections away, and gives them back
    assert model.model.layers[0].horner.mamba.A_log.shape == (4,)
    assert not [name for name, _ in model.named_parameters() if "q_proj" in name or "k_proj" in name or "v_proj" in name]
    model.set_attn_implementation("horner:softmax")
    torch.testing.assert_close(model(tokens).logits, plain, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("variant", ["gated_conv", "gated_delta", "hgrn2", "linear_mamba", "gated_decay@code"])
def test_convolutions_and_no_positions_in_transformers(variant, tmp_path):
    """Padding counts as nothing, packed sequences begin anew, also in a graph; new weights in a folder that has none."""
    transformers = pytest.importorskip("transformers")
    import horner.hf

    config = transformers.LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                                      num_key_value_heads=2, vocab_size=99, pad_token_id=0, bos_token_id=1, eos_token_id=2)  # fmt: skip
    tokens = torch.randint(3, 99, (2, 12), generator=torch.Generator().manual_seed(5))
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=f"horner:{variant}").eval()
    assert all(x.isfinite().all() and x.abs().max() < 100 for x in model.parameters())
    with torch.no_grad():
        whole = model(tokens, use_cache=False).logits
        padded = torch.cat([torch.zeros(2, 3, dtype=torch.long), tokens], 1)
        left = model(padded, attention_mask=(padded != 0).long(), use_cache=False).logits[:, 3:]
        if not torch.ops.horner.around(variant)["rope"]:
            torch.testing.assert_close(left, whole, atol=1e-4, rtol=1e-3)
        ids = torch.arange(12).repeat(2)[None]
        packed = model(tokens.view(1, -1), position_ids=ids, use_cache=False).logits
        torch.testing.assert_close(packed.view(2, 12, -1), whole, atol=1e-4, rtol=1e-3)
        torch.compiler.reset()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(tokens, use_cache=False).logits, whole, atol=1e-4, rtol=1e-3)
        cache = horner.hf.RecurrentCache(model.config)
        parts = [model(tokens[:, a:b], past_key_values=cache).logits for a, b in ((0, 7), (7, 8), (8, 12))]
        torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-4, rtol=1e-3)
        generated = [model.generate(tokens, max_new_tokens=4, do_sample=False, num_beams=2, **{name: x})
                     for name, x in (("use_cache", False), ("past_key_values", horner.hf.RecurrentCache(model.config)))]  # fmt: skip
        assert torch.equal(*generated)
        if variant == "hgrn2":
            return
        with pytest.raises(NotImplementedError, match="gates of its keys"):
            model.generate(tokens, max_new_tokens=3, do_sample=False)


@pytest.mark.parametrize(
    "variant, words",
    [
        ("bias", "adds a bias to each score, which models of the command do not make: use horner.nn or horner.hf"),
        ("softmax:bias", "or an attention with slopes (alibi)"),
        ("prefix_lm", "requires the length of a prefix for each sequence, which the command cannot read: use horner.nn or horner.hf"),
        ("softmax,l2:mask=prefix", "or another mask, such as mask=causal"),
    ],
)
def test_what_the_command_does_not_train_is_in_the_package(variant, words, tmp_path):
    done = subprocess.run([TOOL, "new", "tiny", variant, "3", tmp_path / "model"], capture_output=True, text=True)
    assert done.returncode != 0 and words in done.stderr
    assert horner.nn.Attention(64, 4, variant=variant.split(",")[-1])(torch.randn(1, 5, 64)).shape == (1, 5, 64)


def test_a_block_names_the_options_of_its_attention():
    """With the same defaults: editors see them."""
    for method, own in (("__init__", {"own"}), ("forward", {"own"})):
        block, attention = (inspect.signature(getattr(kind, method)).parameters for kind in (horner.nn.TransformerBlock, horner.nn.Attention))
        assert not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in [*block.values(), *attention.values()])
        assert {name: p for name, p in attention.items() if name not in own}.items() <= dict(block).items()
    with pytest.raises(TypeError, match="unexpected keyword argument 'varaint'"):
        horner.nn.TransformerBlock(64, 4, varaint="l2")
    block = horner.nn.TransformerBlock(64, 4, rope_theta=None, execution="reference", dropout=0.25, mask="window(3)")
    a = block.self_attn
    assert (a.rope_theta, a.execution, a.dropout, a.mask) == (None, "reference", 0.25, "window(3)")
