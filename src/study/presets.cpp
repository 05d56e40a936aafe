// The built-in studies; docs/study.md describes each.
#include "study/study.h"

namespace horner::study {

static const Preset kPresets[] = {
    {"quick", "a few minutes on 2 cores: recall and text, models of 25,000 and 115,000 parameters",
     R"({
  "title": "Attention, quickly: recall and text with tiny models",
  "attention": ["softmax", "l2", "taylor{1..4}", "centred_taylor{1..3}", "by_count", "linear_{elu,relu}"],
  "seeds": [0],
  "settings": {
    "model": "tiny", "device": "cpu", "batch": 64, "length": 64, "warmup": 50,
    "evaluate-every": 50, "evaluate-sequences": 64, "checkpoint-every": 100, "entropy-every": 100, "keep": 1,
    "on-nan": "skip"
  },
  "tasks": [
    {"task": "recall:pairs=16", "settings": {"steps": 600, "learning-rate": 6e-3, "model-config": {
      "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
      "vocab_size": 64, "horner": {"key_shift": true}}}},
    {"task": "text", "settings": {"steps": 300, "learning-rate": 2e-3, "length": 128, "batch": 16}}
  ]
})"},
    {"paper-small",
     "for a GPU: the full ablation with the 10 M model on text, 44 variants, 3 seeds",
     R"({
  "title": "The ablation: what softmax attention is made of",
  "attention": ["softmax", "l2", "rms", "rms:clamp=inf", "layer_norm", "layer_norm:clamp=inf,denominator=nothing",
                "clamped_sum", "detached_sum", "by_count", "by_count_gate", "gate", "gated", "gated_no_norm", "l2_post_gate",
                "relu_l2", "taylor{1..10}", "centred_taylor{1..4}", "centred_taylor{6,8,10}",
                "linear_elu", "linear_relu", "linear_cosine", "elu_taylor{2,4,10}", "relu_taylor{2,4,10}", "cosine_taylor{2,4,10}"],
  "seeds": [0, 1, 2],
  "settings": {
    "model": "10m", "dtype": "bfloat16", "steps": 1000, "batch": 64, "length": 512, "learning-rate": 2e-3, "warmup": 100,
    "evaluate-every": 100, "evaluate-sequences": 128, "checkpoint-every": 500, "keep": 1, "on-nan": "skip"
  },
  "tasks": ["text"]
})"},
    {"books-small",
     "for a GPU: the rows of the first paper with 17 M weights on books, 3 rates, 3 seeds; "
     "requires token files",
     R"({
  "title": "The ablation on books: what softmax attention is made of",
  "about": "Language: books.bin and books-valid.bin are token files of English books with a BPE vocabulary of 16,384 (docs/text.md has the commands); other books are for validation, the same sequences for every run. Three learning rates for every variant, more where the best is at the edge.",
  "attention": ["softmax", "l2", "rms", "rms:clamp=inf", "layer_norm", "layer_norm:clamp=inf,denominator=nothing",
                "clamped_sum", "detached_sum", "by_count", "by_count_gate", "gate", "gated", "gated_no_norm", "l2_post_gate",
                "relu_l2", "taylor{1..10}", "centred_taylor{1..4}", "centred_taylor{6,8,10}",
                "linear_elu", "linear_relu", "linear_cosine", "elu_taylor{2,4,10}", "relu_taylor{2,4,10}", "cosine_taylor{2,4,10}"],
  "seeds": [0, 1, 2],
  "learning-rates": [1e-3, 2e-3, 4e-3],
  "settings": {
    "model": "10m", "data": "books.bin", "validation": "books-valid.bin", "dtype": "bfloat16", "steps": 1000, "batch": 64,
    "length": 512, "warmup": 100, "model-config": {"vocab_size": 16384, "tie_word_embeddings": true},
    "evaluate-every": 250, "evaluate-sequences": 256, "checkpoint-every": 0, "entropy-every": 0, "keep": 1, "on-nan": "skip"
  },
  "tasks": ["text"]
})"},
    {"books-paper",
     "for a GPU: softmax, l2 and taylor10 with the first paper's 275 M weights on books, 151 M "
     "tokens; requires token files",
     R"({
  "title": "The paper's model on books",
  "about": "The first paper's model (275 M weights with its vocabulary of 32,000, of which the 16,384 tokens of the books use a part) and batch, 4,100 steps of 36 sequences of 1,024 tokens: 151 M tokens, a twenty-fourth of the paper's. Its schedule does not fit so few steps: warmup over 400 steps, then linear decay to 0, three learning rates. For 4,096 tokens with as many in a step: --set '{\"length\": 4096, \"batch\": 9}'.",
  "attention": ["softmax", "l2", "taylor10"],
  "seeds": [0],
  "learning-rates": [3e-4, 6e-4, 1.2e-3],
  "settings": {
    "model": "small", "data": "books.bin", "validation": "books-valid.bin", "dtype": "bfloat16", "steps": 4100, "batch": 36,
    "length": 1024, "warmup": 400, "beta2": 0.95, "weight-decay": 0.1, "evaluate-every": 400, "evaluate-sequences": 256,
    "checkpoint-every": 1000, "entropy-every": 500, "keep": 1, "on-nan": "skip"
  },
  "tasks": ["text"]
})"},
    {"orders",
     "for a GPU: the order sweep, 1 to 10, plain, centred and without a floor, 3 seeds, 10 M model",
     R"({
  "title": "The order sweep: the series of exp, plain, centred and without a floor",
  "attention": ["softmax", "taylor{1..10}", "centred_taylor{1..10}", "raw_taylor{1,3,5,7,9}"],
  "seeds": [0, 1, 2],
  "settings": {
    "model": "10m", "dtype": "bfloat16", "steps": 600, "batch": 32, "length": 512, "learning-rate": 2e-3, "warmup": 60,
    "evaluate-every": 100, "evaluate-sequences": 128, "checkpoint-every": 600, "keep": 1, "on-nan": "skip"
  },
  "tasks": ["text"]
})"},
    {"recall", "for a GPU: recall against the number of pairs", R"({
  "title": "How much can it hold? Recall against the number of pairs",
  "attention": ["softmax", "l2", "taylor{1..6}", "centred_taylor{1..4}", "linear_{elu,relu,cosine}", "elu_taylor{2,4}"],
  "seeds": [0],
  "settings": {
    "model": "tiny", "steps": 1500, "batch": 128, "length": 256, "learning-rate": 3e-3, "warmup": 100, "evaluate-every": 250,
    "evaluate-sequences": 256, "checkpoint-every": 1000, "keep": 1, "on-nan": "skip", "model-config": {
      "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32,
      "vocab_size": 256, "horner": {"key_shift": true}}
  },
  "tasks": ["recall:pairs=8,vocabulary=256", "recall:pairs=16,vocabulary=256", "recall:pairs=32,vocabulary=256",
            "recall:pairs=64,vocabulary=256"]
})"},
    {"state-tracking",
     "minutes on 16 cores: parity and S3 at 1, 2 and 4 times the length of training",
     R"({
  "title": "What the delta rule is for: tracking a state beyond the length of training",
  "about": "Parity of bits and products of transpositions of S3, with an answer after every token. Solved: at least 99 % of the answers at 4 times the length of training. The same for every variant: no positions and no short convolution (both would favour the lengths of training), torch's initial weights (with a standard deviation of 0.02 the gates of so small a model hardly move at first), no weight decay (it pulls gates away from 0 and 1, which exact counting needs), and three learning rates, of which the report takes that with the lowest loss at the length of training.",
  "attention": ["softmax", "gla", "delta", "delta_negative"],
  "seeds": [0, 1, 2],
  "learning-rates": [1e-3, 3e-3, 1e-2],
  "settings": {
    "model": "tiny", "device": "cpu", "steps": 500, "batch": 32, "length": 64, "weight-decay": 0,
    "evaluate-every": 100, "evaluate-sequences": 128, "evaluate-lengths": "64,128,256", "checkpoint-every": 0,
    "entropy-every": 0, "keep": 1, "on-nan": "skip",
    "model-config": {"vocab_size": 8, "horner": {"rope": false, "short_conv": 0, "init": "torch"}}
  },
  "tasks": ["parity", "s3"]
})"},
    {"recall-state", "minutes on 16 cores: recall of 256 pairs with states of about 4,900 numbers",
     R"({
  "title": "How much fits in a small state? Multi-query recall with the delta rule and the series of exp",
  "about": "Multi-query associative recall (arXiv 2312.04927) of 256 keys and 32 values with one layer, whose keys come from the previous token. The states of the linear variants have about the same size: gated_delta 1 head of 70 channels, 4,900 numbers; delta_taylor2 and taylor2 2 heads of 16 channels with 153 features, 4,896 and 5,202. softmax keeps all keys and values. Solved: at least 99 % of the answers. The same for every variant: budget, learning rates, no positions, no short convolution, torch's initial weights, no weight decay, and a curriculum as in that paper's code: training begins with 4 pairs in 16 tokens and adds 8, 16, … up to 256 over the first 7,000 of 10,000 sequences. How the setting was fixed: of trials with 16, 64 and then 256 pairs, one seed each, the first in which gated_delta and delta_taylor2, which earlier stayed at the level of guessing, both leave it with 256 pairs; nothing was chosen by which of them is ahead.",
  "attention": ["softmax", "gated_delta", "delta_taylor2", "taylor2"],
  "seeds": [0, 1, 2],
  "learning-rates": [3e-4, 1e-3, 3e-3],
  "extend-rates": 1,
  "settings": {
    "model": "tiny", "device": "cpu", "steps": 1250, "batch": 8, "length": 768, "weight-decay": 0,
    "evaluate-every": 250, "evaluate-sequences": 64, "checkpoint-every": 0, "entropy-every": 0, "keep": 1, "on-nan": "skip",
    "model-config": {"num_hidden_layers": 1, "vocab_size": 289, "tie_word_embeddings": true,
      "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
      "horner": {"key_shift": true, "rope": false, "short_conv": 0, "init": "torch"}}
  },
  "attention-settings": {"gated_delta": {"model-config": {"num_hidden_layers": 1, "vocab_size": 289, "tie_word_embeddings": true,
      "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 70,
      "horner": {"key_shift": true, "rope": false, "short_conv": 0, "init": "torch"}}}},
  "tasks": ["mqar:pairs=256,vocabulary=289,values=32,curriculum=7000"]
})"},
    {"denominators",
     "for a GPU: section 4.5 of the first paper, every denominator with 17 M weights on books; "
     "requires token files",
     R"({
  "title": "What may stand for the denominator",
  "about": "Section 4.5 of the first paper: the sum clamped, detached or left out, division by the count, gates, norms, and relu for exp. Model, data and rates are those of books-small.",
  "attention": ["softmax", "clamped_sum", "detached_sum", "detached_sum_gate", "by_count", "gate", "by_count_gate", "by_count_rms",
                "layer_norm", "rms", "l2", "l2_clamped", "l2_times_dim", "l2_post_gate", "gated", "gated_no_norm", "gated_no_in",
                "gated_no_out", "gated_in_only", "cumulative_gate", "relu_l2", "relu_gate"],
  "seeds": [0, 1, 2],
  "learning-rates": [1e-3, 2e-3, 4e-3],
  "settings": {
    "model": "10m", "data": "books.bin", "validation": "books-valid.bin", "dtype": "bfloat16", "steps": 1000, "batch": 64,
    "length": 512, "warmup": 100, "model-config": {"vocab_size": 16384, "tie_word_embeddings": true},
    "evaluate-every": 250, "evaluate-sequences": 256, "checkpoint-every": 0, "entropy-every": 0, "keep": 1, "on-nan": "skip"
  },
  "tasks": ["text"]
})"},
    {"kernels",
     "for a GPU: section 4.4 of the first paper, powers added to linear kernels, with 17 M weights "
     "on books; requires token files",
     R"({
  "title": "Do powers make a linear kernel softmax?",
  "about": "Section 4.4 of the first paper: linear attention with elu + 1, relu and cosine kernels, then with the series of exp of the same kernels up to order n, beside the series of exp itself. Model, data and rates are those of books-small.",
  "attention": ["softmax", "taylor{1,2,3,4,6,8,10}", "linear_{elu,relu,cosine}", "{elu,relu,cosine}_taylor{2,3,4,6,8,10}"],
  "seeds": [0, 1, 2],
  "learning-rates": [1e-3, 2e-3, 4e-3],
  "settings": {
    "model": "10m", "data": "books.bin", "validation": "books-valid.bin", "dtype": "bfloat16", "steps": 1000, "batch": 64,
    "length": 512, "warmup": 100, "model-config": {"vocab_size": 16384, "tie_word_embeddings": true},
    "evaluate-every": 250, "evaluate-sequences": 256, "checkpoint-every": 0, "entropy-every": 0, "keep": 1, "on-nan": "skip"
  },
  "tasks": ["text"]
})"},
    {"normalisers",
     "for a GPU: the normalisers of the second paper, trained with 17 M weights on books and "
     "tested at 1 to 8 times the length; requires token files",
     R"({
  "title": "Normalisers, trained: which still select at 8 times the length of training?",
  "about": "The second paper recommends normalisers that follow the length of a row, and measures softmax only. Here each is trained, validated at 512 to 4,096 tokens, and its heads are diagnosed at both ends. Model, data and rates are those of books-small; rotary positions for all.",
  "attention": ["softmax", "softmax1", "ssmax", "entmax15", "asentmax", "sparsemax", "topk", "sa_softmax", "adaptive_temperature"],
  "seeds": [0, 1, 2],
  "learning-rates": [1e-3, 2e-3, 4e-3],
  "diagnose": [512, 4096],
  "settings": {
    "model": "10m", "data": "books.bin", "validation": "books-valid.bin", "dtype": "bfloat16", "steps": 1000, "batch": 64,
    "length": 512, "warmup": 100, "model-config": {"vocab_size": 16384, "tie_word_embeddings": true},
    "evaluate-every": 250, "evaluate-sequences": 256, "evaluate-lengths": "512,1024,2048,4096", "checkpoint-every": 0,
    "entropy-every": 0, "keep": 1, "on-nan": "skip"
  },
  "tasks": ["text"]
})"},
    {"normalisers-small",
     "minutes on 2 cores: the same question with 115,000 weights on the bytes of books; requires "
     "token files",
     R"({
  "title": "Normalisers, trained: a small version for a CPU",
  "about": "The question of 'normalisers' with 2 layers of width 64 (4 heads of 16 channels), trained on 128 bytes of English books (books-bytes.bin and books-bytes-valid.bin, see docs/text.md) and tested at up to 1,024. Settings were fixed before any of its runs: those of the quick study's text, with three learning rates and three seeds.",
  "attention": ["softmax", "ssmax", "entmax15", "sparsemax", "topk", "sa_softmax"],
  "seeds": [0, 1, 2],
  "learning-rates": [2e-3, 4e-3, 8e-3],
  "extend-rates": 0,
  "diagnose": [128, 1024],
  "settings": {
    "model": "tiny", "device": "cpu", "data": "books-bytes.bin", "validation": "books-bytes-valid.bin", "steps": 300, "batch": 16,
    "length": 128, "warmup": 50, "evaluate-every": 100, "evaluate-sequences": 64, "evaluate-lengths": "128,256,512,1024",
    "checkpoint-every": 0, "entropy-every": 0, "keep": 1, "on-nan": "skip"
  },
  "tasks": ["text"]
})"},
    {"lengths",
     "for a GPU: trained at 512 tokens, tested to 32,768: needles in books, recall, text; "
     "requires token files",
     R"({
  "title": "Beyond the length of training: 512 to 32,768 tokens",
  "about": "Four numbers at random places of a book (the bytes of books-bytes.bin), all asked at the end; multi-query recall of 64 pairs with the paper's vocabulary of 8,192, asked ever later; and the loss on the book itself. Four layers of 4 heads of 64 channels. A row that follows distance or length is beside each of the plain ones.",
  "attention": ["softmax", "ssmax", "asentmax", "alibi", "forgetting", "stick_breaking", "l2", "taylor2", "linear_elu", "retention",
                "gla", "delta", "gated_delta"],
  "seeds": [0, 1, 2],
  "learning-rates": [3e-4, 1e-3, 3e-3],
  "settings": {
    "model": "tiny", "data": "books-bytes.bin", "validation": "books-bytes-valid.bin", "dtype": "bfloat16", "steps": 4000, "batch": 64,
    "length": 512, "warmup": 200, "evaluate-every": 1000, "evaluate-sequences": 64,
    "evaluate-lengths": "512,1024,2048,4096,8192,16384,32768", "checkpoint-every": 1000, "entropy-every": 0, "keep": 1,
    "on-nan": "skip", "model-config": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
      "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 256}
  },
  "tasks": ["needle", "text",
            {"task": "mqar:pairs=64,vocabulary=8192,curriculum=128000", "settings": {"data": "", "validation": "", "model-config":
              {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
               "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 8192, "horner": {"short_conv": 4}}}}]
})"},
    {"patterns",
     "for a GPU: one layer of softmax in n, with 17 M weights on books and on recall; requires "
     "token files",
     R"({
  "title": "How many layers must be softmax?",
  "about": "Six layers: all softmax, one in 2, 3 and 6, and none, with three linear kinds of attention in the others. Books as in books-small; recall of 64 pairs with the same six layers at a width of 128.",
  "attention": ["softmax", "linear_elu", "linear_elu,softmax", "linear_elu*2,softmax", "linear_elu*5,softmax",
                "taylor2", "taylor2,softmax", "taylor2*2,softmax", "taylor2*5,softmax",
                "gated_delta", "gated_delta,softmax", "gated_delta*2,softmax", "gated_delta*5,softmax"],
  "seeds": [0, 1, 2],
  "learning-rates": [1e-3, 2e-3, 4e-3],
  "settings": {
    "model": "10m", "dtype": "bfloat16", "steps": 1000, "batch": 64, "length": 512, "warmup": 100, "evaluate-every": 250,
    "evaluate-sequences": 256, "checkpoint-every": 0, "entropy-every": 0, "keep": 1, "on-nan": "skip"
  },
  "tasks": [{"task": "text", "settings": {"data": "books.bin", "validation": "books-valid.bin",
              "model-config": {"vocab_size": 16384, "tie_word_embeddings": true}}},
            {"task": "mqar:pairs=64,vocabulary=1024,curriculum=40000", "settings": {"length": 256, "model-config":
              {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32,
               "vocab_size": 1024, "tie_word_embeddings": true, "horner": {"short_conv": 4}}}}]
})"},
    {"capacity",
     "for a GPU: recall of 16 to 256 pairs with states of several sizes, and a fitted law",
     R"({
  "title": "How much does a state hold? Recall against its size",
  "about": "Multi-query recall with one layer of 2 heads, whose keys come from the previous token, as in recall-state: 16, 64 and 256 pairs, each with heads of 8, 16 and 32 channels. The report fits the number of pairs of which half are recalled as a power of the numbers in the state.",
  "attention": ["softmax", "linear_elu", "delta", "gated_delta", "taylor2", "delta_taylor2"],
  "seeds": [0, 1, 2],
  "learning-rates": [3e-4, 1e-3, 3e-3],
  "extend-rates": 1,
  "settings": {"model": "tiny", "steps": 1250, "batch": 8, "length": 768, "weight-decay": 0, "evaluate-every": 250,
    "evaluate-sequences": 64, "checkpoint-every": 0, "entropy-every": 0, "keep": 1, "on-nan": "skip"},
  "tasks": [{"task": "mqar:pairs=16,vocabulary=289,values=32,curriculum=7000", "size": "d8", "settings": {"model-config":
              {"num_hidden_layers": 1, "vocab_size": 289, "tie_word_embeddings": true, "num_attention_heads": 2,
               "num_key_value_heads": 2, "head_dim": 8, "horner": {"key_shift": true, "rope": false, "short_conv": 0, "init": "torch"}}}},
            {"task": "mqar:pairs=64,vocabulary=289,values=32,curriculum=7000", "size": "d8", "settings": {"model-config":
              {"num_hidden_layers": 1, "vocab_size": 289, "tie_word_embeddings": true, "num_attention_heads": 2,
               "num_key_value_heads": 2, "head_dim": 8, "horner": {"key_shift": true, "rope": false, "short_conv": 0, "init": "torch"}}}},
            {"task": "mqar:pairs=256,vocabulary=289,values=32,curriculum=7000", "size": "d8", "settings": {"model-config":
              {"num_hidden_layers": 1, "vocab_size": 289, "tie_word_embeddings": true, "num_attention_heads": 2,
               "num_key_value_heads": 2, "head_dim": 8, "horner": {"key_shift": true, "rope": false, "short_conv": 0, "init": "torch"}}}},
            {"task": "mqar:pairs=16,vocabulary=289,values=32,curriculum=7000", "size": "d16", "settings": {"model-config":
              {"num_hidden_layers": 1, "vocab_size": 289, "tie_word_embeddings": true, "num_attention_heads": 2,
               "num_key_value_heads": 2, "head_dim": 16, "horner": {"key_shift": true, "rope": false, "short_conv": 0, "init": "torch"}}}},
            {"task": "mqar:pairs=64,vocabulary=289,values=32,curriculum=7000", "size": "d16", "settings": {"model-config":
              {"num_hidden_layers": 1, "vocab_size": 289, "tie_word_embeddings": true, "num_attention_heads": 2,
               "num_key_value_heads": 2, "head_dim": 16, "horner": {"key_shift": true, "rope": false, "short_conv": 0, "init": "torch"}}}},
            {"task": "mqar:pairs=256,vocabulary=289,values=32,curriculum=7000", "size": "d16", "settings": {"model-config":
              {"num_hidden_layers": 1, "vocab_size": 289, "tie_word_embeddings": true, "num_attention_heads": 2,
               "num_key_value_heads": 2, "head_dim": 16, "horner": {"key_shift": true, "rope": false, "short_conv": 0, "init": "torch"}}}},
            {"task": "mqar:pairs=16,vocabulary=289,values=32,curriculum=7000", "size": "d32", "settings": {"model-config":
              {"num_hidden_layers": 1, "vocab_size": 289, "tie_word_embeddings": true, "num_attention_heads": 2,
               "num_key_value_heads": 2, "head_dim": 32, "horner": {"key_shift": true, "rope": false, "short_conv": 0, "init": "torch"}}}},
            {"task": "mqar:pairs=64,vocabulary=289,values=32,curriculum=7000", "size": "d32", "settings": {"model-config":
              {"num_hidden_layers": 1, "vocab_size": 289, "tie_word_embeddings": true, "num_attention_heads": 2,
               "num_key_value_heads": 2, "head_dim": 32, "horner": {"key_shift": true, "rope": false, "short_conv": 0, "init": "torch"}}}},
            {"task": "mqar:pairs=256,vocabulary=289,values=32,curriculum=7000", "size": "d32", "settings": {"model-config":
              {"num_hidden_layers": 1, "vocab_size": 289, "tie_word_embeddings": true, "num_attention_heads": 2,
               "num_key_value_heads": 2, "head_dim": 32, "horner": {"key_shift": true, "rope": false, "short_conv": 0, "init": "torch"}}}}]
})"},
    {"scaling",
     "for a GPU: five sizes of model on the same tokens of books, and a fitted law; requires token "
     "files",
     R"({
  "title": "Loss against weights, by variant",
  "about": "Five models of 4.9 to 33 M weights, each trained on the same 33 M tokens of books: the loss of a fixed amount of data, not of a fixed amount of compute. The report fits floor + height · weights^-exponent to all runs of a variant.",
  "attention": ["softmax", "l2", "taylor4", "linear_elu", "gated_delta"],
  "seeds": [0, 1, 2],
  "learning-rates": [1e-3, 2e-3, 4e-3],
  "settings": {
    "model": "10m", "data": "books.bin", "validation": "books-valid.bin", "dtype": "bfloat16", "steps": 1000, "batch": 64,
    "length": 512, "warmup": 100, "evaluate-every": 250, "evaluate-sequences": 256, "checkpoint-every": 0, "entropy-every": 0,
    "keep": 1, "on-nan": "skip"
  },
  "tasks": [{"task": "text", "size": "w192", "settings": {"model-config": {"hidden_size": 192, "intermediate_size": 512,
              "num_hidden_layers": 4, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 16384,
              "tie_word_embeddings": true}}},
            {"task": "text", "size": "w256", "settings": {"model-config": {"hidden_size": 256, "intermediate_size": 672,
              "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 16384,
              "tie_word_embeddings": true}}},
            {"task": "text", "size": "w320", "settings": {"model-config": {"hidden_size": 320, "intermediate_size": 832,
              "num_hidden_layers": 6, "num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 64, "vocab_size": 16384,
              "tie_word_embeddings": true}}},
            {"task": "text", "size": "w384", "settings": {"model-config": {"hidden_size": 384, "intermediate_size": 1024,
              "num_hidden_layers": 8, "num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 64, "vocab_size": 16384,
              "tie_word_embeddings": true}}},
            {"task": "text", "size": "w512", "settings": {"model-config": {"hidden_size": 512, "intermediate_size": 1344,
              "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 16384,
              "tie_word_embeddings": true}}}]
})"},
    {"arena", "for a GPU: 12 variants on recall, copying, state tracking and the tasks of MAD",
     R"({
  "title": "The arena: twelve variants, tasks that tell them apart",
  "about": "Models of two layers with 4 heads of 32 channels and a short convolution over 4 tokens for every variant, because recall takes what comes after a key. Sizes of the tasks as in their papers, where a length does not stand for itself; three learning rates for every variant.",
  "attention": ["softmax", "l2", "taylor2", "based", "linear_elu", "retention", "gla", "delta", "gated_delta", "delta_negative",
                "forgetting", "ssmax"],
  "seeds": [0, 1, 2],
  "learning-rates": [1e-3, 3e-3, 1e-2],
  "settings": {
    "model": "tiny", "steps": 2000, "batch": 64, "weight-decay": 0.1, "evaluate-every": 500, "evaluate-sequences": 256,
    "checkpoint-every": 0, "entropy-every": 0, "keep": 1, "on-nan": "skip",
    "model-config": {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4,
      "head_dim": 32, "vocab_size": 256, "tie_word_embeddings": true, "horner": {"short_conv": 4}}
  },
  "tasks": [{"task": "mqar:pairs=32,vocabulary=256,curriculum=60000", "settings": {"length": 128}},
            {"task": "phone_book:pairs=16", "settings": {"length": 256}}, {"task": "copy", "settings": {"length": 128}},
            {"task": "mad_recall", "settings": {"length": 128}}, {"task": "mad_noisy", "settings": {"length": 128}},
            {"task": "mad_fuzzy", "settings": {"length": 128}}, {"task": "mad_memorize", "settings": {"length": 32}},
            {"task": "mad_compress", "settings": {"length": 32}}, {"task": "mad_select", "settings": {"length": 256}},
            {"task": "automata", "settings": {"length": 256}},
            {"task": "parity", "settings": {"length": 64, "evaluate-lengths": "64,128,256,512"}},
            {"task": "modular", "settings": {"length": 64, "evaluate-lengths": "64,128,256,512"}},
            {"task": "s5", "settings": {"length": 64, "evaluate-lengths": "64,128,256,512"}}]
})"},
    {"paper",
     "the first paper's own setting, 275 M parameters: days on a GPU; requires your own token "
     "file; "
     "--list says where it differs",
     R"json({
  "title": "The ablation in the paper's own setting",
  "about": "As in the authors' code: sizes, optimizer, schedule, initial distributions (embedding and head normal 0.02, layers and gates as torch's modules, norms 1), eps of norms (RMSNorm over a head: 2^-7, the machine epsilon of bfloat16, torch's default in their version), weight decay of all parameters, gradient clipping at 1 for variants with a gate and none otherwise, steps with a NaN or infinite gradient skipped (their GradScaler does that). Differences: sequences are 1,024 consecutive tokens of one stream, where theirs are documents, cut or padded to that length; a twentieth of the text is held out, not a thousandth; the learning rate is at most two steps of the schedule away; variants follow the equations, those that end in @code the code.",
  "attention": ["softmax", "l2", "rms:norm=rms(eps=0.0078125)", "layer_norm", "by_count", "by_count_gate", "gated",
                "taylor{1..4}", "taylor{6,8,10}", "linear_elu", "linear_relu", "linear_cosine"],
  "seeds": [0],
  "settings": {
    "model": "small", "data": "train.bin", "dtype": "bfloat16", "steps": 100000, "batch": 36, "length": 1024,
    "learning-rate": 1e-4, "warmup": 10000, "decay-steps": 1000000, "beta1": 0.9, "beta2": 0.999, "eps": 1e-7,
    "weight-decay": 0.01, "decay-all": true, "clip": 0, "model-config": {"horner": {"init": "torch"}},
    "evaluate-every": 10000, "evaluate-sequences": 1024, "checkpoint-every": 2000, "entropy-every": 1000, "on-nan": "skip"
  },
  "attention-settings": {"*gate*": {"clip": 1}},
  "tasks": ["text"]
})json"},
};

std::vector<Preset> presets() {
  return {std::begin(kPresets), std::end(kPresets)};
}

}  // namespace horner::study
