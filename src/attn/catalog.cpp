#include "attn/catalog.h"

#include <charconv>
#include <sstream>

#include "attn/plan.h"
#include "attn/spec_text.h"
#include "core/check.h"
#include "core/names.h"

namespace horner::attn {

static constexpr const char* kPaper1 = "arXiv 2507.23632";

// To add a variant, add a row. The command line, Python, the tests, the benchmarks and the reports
// all read these tables. A row "<name>@code" follows the authors' code where that differs from
// their equation.
// clang-format off
struct Mechanism {
  const char* title;
  std::vector<Variant> rows;
};
static const Mechanism kMechanisms[] = {
{"softmax, and what stands for its denominator", {
    {"softmax",             {},                                                                                        "exp, divided by its sum",                                        "Vaswani et al. 2017", "sdpa full_attention"},
    {"softmax_window",      {.mask = Window{128}},                                                                     "softmax of the last 128 keys",                                   "Beltagy et al. 2020", "sliding_window swa"},
    {"cosine_softmax",      {.features = Cosine{}, .scale = Fixed{10}},                                                "softmax of cosine similarities, times 10",                       "arXiv 1702.05870"},
    {"softmax_out_gate",    {.output_gate = true},                                                                     "softmax, then one gate per head",                                "arXiv 2505.06708, headwise", "gated_attention_headwise"},
    {"clamped_sum",         {.clamp = 5, .denominator = Sum{.least = 1}},                                              "the sum, at least 1",                                            kPaper1, "softmax_clamp_denom"},
    {"detached_sum",        {.clamp = 5, .denominator = Sum{.least = 1, .detach = true}},                              "no gradient through the sum",                                    kPaper1, "softmax_detach_denom"},
    {"detached_sum_gate",   {.clamp = 5, .denominator = Sum{.plus = 1e-4, .detach = true}, .output_gate = true},       "no gradient through the sum, but a gate",                        kPaper1, "softmax_detach_denom_gate"},
    {"by_count",            {.clamp = 5, .denominator = Count{}},                                                      "division by the count of keys",                                  kPaper1, "softmax_divs gated_softmax_no_gate_no_norm"},
    {"gate",                {.clamp = 5, .denominator = Nothing{}, .output_gate = true},                               "a gate for the denominator",                                     kPaper1, "softmax_gate"},
    {"by_count_gate",       {.clamp = 5, .denominator = Count{}, .output_gate = true},                                 "the count, then a gate",                                         kPaper1, "softmax_divS_gate softmax_divS_gatev2 gated_softmax_no_in_gate_no_norm"},
    {"by_count_rms",        {.clamp = 5, .denominator = Count{}, .norm = Rms{}},                                       "the count, then RMSNorm",                                        kPaper1, "softmax_divS_norm gated_softmax_no_gate_rmsnorm"},
    {"layer_norm",          {.clamp = 5, .denominator = Count{}, .norm = Layer{}},                                     "the count, then LayerNorm",                                      kPaper1, "gated_softmax_no_gate"},
    {"rms",                 {.clamp = 5, .denominator = Nothing{}, .norm = Rms{}},                                     "RMSNorm for the denominator",                                    kPaper1, "gated_softmax_no_gate_rmsnorm_nodivS"},
    {"l2",                  {.denominator = Nothing{}, .norm = L2{}},                                                  "the length for the denominator: the paper's proposal",           kPaper1, "gated_softmax_no_gate_L2norm_nodivS_noclamp"},
    {"l2_clamped",          {.clamp = 5, .denominator = Nothing{}, .norm = L2{}},                                      "the same, scores clamped at 5",                                  kPaper1, "gated_softmax_no_gate_L2norm_nodivS"},
    {"l2_times_dim",        {.clamp = 5, .denominator = Nothing{}, .norm = L2{.times_dim = true}},                     "the same, times the head dimension",                             kPaper1, "gated_softmax_no_gate_customnorm"},
    {"l2_out_gate",         {.denominator = Nothing{}, .output_gate = true, .norm = L2{}},                             "a gate before the norm",                                         kPaper1, "gated_softmax_out_gate_L2norm_nodivS_noclamp"},
    {"l2_out_gate@code",    {.denominator = Count{}, .output_gate = true, .norm = L2{}},                               "the same, still divided by the count",                           kPaper1},
    {"l2_post_gate",        {.denominator = Nothing{}, .norm = L2{}, .post_gate = true},                               "a gate after the norm",                                          kPaper1, "gated_softmax_post_out_gate_L2norm_nodivS_noclamp"},
    {"l2_post_gate@code",   {.denominator = Count{}, .output_gate = true, .norm = L2{}, .post_gate = true},            "the gate on both sides, still divided by the count",             kPaper1},
    {"gated",               {.clamp = 5, .input_gate = true, .denominator = Count{}, .output_gate = true, .norm = Layer{}},  "both gates, the count and LayerNorm",                      kPaper1, "gated_softmax"},
    {"gated_no_norm",       {.clamp = 5, .input_gate = true, .denominator = Count{}, .output_gate = true},             "gated, without the norm",                                        kPaper1, "gated_softmax_no_norm"},
    {"gated_no_in",         {.clamp = 5, .denominator = Count{}, .output_gate = true, .norm = Layer{}},                "gated, without the input gate",                                  kPaper1, "gated_softmax_no_in_gate"},
    {"gated_no_out",        {.clamp = 5, .input_gate = true, .denominator = Count{}, .norm = Layer{}},                 "gated, without the output gate",                                 kPaper1, "gated_softmax_no_out_gate"},
    {"gated_in_only",       {.clamp = 5, .input_gate = true, .denominator = Count{}},                                  "gated, with only the input gate",                                kPaper1, "gated_softmax_no_out_gate_no_norm"},
    {"gated_decay",         {.clamp = 5, .decay = TokenGate{}, .input_gate = true, .denominator = Count{}, .output_gate = true, .norm = Layer{}}, "gated, with decay",        kPaper1, "gated_softmax_decay"},
    {"gated_decay@code",    {.clamp = 5, .decay = TokenGate{}, .input_gate = true, .denominator = Count{}, .output_gate = true}, "decay by raw gates / 1024, no positions, no norm", kPaper1, "", {.rope = false, .raw_decay = true}},
    {"gated_conv",          {.clamp = 5, .input_gate = true, .denominator = Count{}, .output_gate = true, .norm = Layer{}},  "gated, on q, k, v that the model convolves over 4 tokens", kPaper1, "gated_softmax_plusplus gated_softmax_plusplus_extratoks", {.short_conv = 4}},
    {"cumulative_gate",     {.clamp = 5, .denominator = CumulativeGate{.least = 1}},                                   "a running sum of exp gates for the denominator",                 kPaper1, "gated_softmax_cumgate"},
    {"cumulative_gate_count",      {.clamp = 5, .denominator = CumulativeGate{.times_count = true}},                   "the same, times the count",                                      kPaper1, "cumulative_gated_softmax"},
    {"cumulative_gate_count@code", {.clamp = 5, .denominator = Count{}, .output_gate = true},                          "a gate exp(−x) for the running sum, and the count", kPaper1, "", {.exp_gate = true}},
}},
{"other weights, and linear attention", {
    {"relu_l2",             {.features = Relu{}, .weight = Power{1}, .denominator = Nothing{}, .norm = L2{}},          "relu for exp, and a norm",                                       kPaper1, "gated_ReLU_no_gate_L2norm_nodivS_noclamp"},
    {"relu_gate",           {.features = Relu{}, .clamp = 5, .weight = Power{1}, .denominator = Count{}, .output_gate = true}, "relu for exp, the count and a gate",                     kPaper1, "gated_relu_no_in_gate_no_norm"},
    {"linear",              {.weight = Power{1}, .denominator = Count{}},                                              "order 1 alone: q.k, divided by the count",                       kPaper1},
    {"linear_elu",          {.features = Elu1{}, .scale = Fixed{1}, .weight = Power{1}},                               "linear attention, elu + 1",                                      "Katharopoulos et al. 2020", "linear_attention linear_transformer"},
    {"linear_relu",         {.features = Relu{}, .scale = Fixed{1}, .weight = Power{1}, .denominator = Sum{.plus = 1e-8}}, "linear attention, relu",                                    kPaper1},
    {"linear_cosine",       {.features = Cosine{}, .scale = Fixed{1}, .weight = Power{1}, .values = CountPower{}, .denominator = Nothing{}}, "linear attention, cosine similarity (Cottention)", "arXiv 2409.18747", "cottention"},
    {"linear_cosine@code",  {.features = Cosine{.over_heads = true}, .scale = Fixed{1}, .weight = Power{1}, .values = CountPower{}, .denominator = Nothing{}}, "lengths taken over the heads of a token", kPaper1},
    {"linear_mamba",        {.scale = Fixed{1}, .weight = Power{1}, .decay = TokenGate{}, .input_gate = true, .denominator = Nothing{}}, "the sum of a Mamba-2 block; the model adds the block", "arXiv 2405.21060", "mamba2 ssd", {.short_conv = 2, .rope = false, .mamba = true}},
    {"linear_decay",        {.weight = Power{1}, .decay = TokenGate{}, .denominator = Nothing{}, .norm = Rms{}},       "linear attention, each token with its own decay",                "Horner"},
    {"retention",           {.weight = Power{1}, .decay = HeadSlope{}, .denominator = Nothing{}, .norm = Rms{}},       "linear attention, each head with its own decay; RetNet without its swish gate", "arXiv 2307.08621", "retnet"},
    {"based",               {.features = Project{16}, .weight = Taylor{2}, .denominator = Sum{.plus = 1e-12}},        "order 2 on a 16-dimensional projection",                         "arXiv 2402.18668"},
    {"taylor79",            {.weight = Taylor{79}},                                                                    "80 terms of the series",                                         kPaper1, "softmax_taylor_80terms"},
    {"taylor79@code",       {.weight = Taylor{79}, .denominator = Nothing{}},                                          "80 terms of the series, the denominator dropped",                kPaper1},
    {"sigmoid",             {.less_log_count = true, .weight = Sigmoid{}, .denominator = Nothing{}},                    "a sigmoid of each score less log n",                             "arXiv 2409.04431"},
    {"sigmoid_by_count",    {.weight = Sigmoid{}, .denominator = Count{}},                                             "a sigmoid of each score, divided by the count",                  "Horner"},
}},
{"normalisers that follow the length of a row", {
    {"softmax1",            {.denominator = Sum{.plus = 1}},                                                           "softmax that may choose nothing",                                "Miller 2023", "quiet_softmax off_by_one"},
    {"ssmax",               {.sharpness = LogLength{}},                                                                "sharper with the log of the length",                             "arXiv 2501.19399", "scalable_softmax"},
    {"sparsemax",           {.weight = Entmax{2}, .denominator = Nothing{}},                                           "the nearest point of the simplex",                               "arXiv 1602.02068"},
    {"entmax15",            {.weight = Entmax{1.5}, .denominator = Nothing{}},                                        "between softmax and sparsemax",                                  "arXiv 1905.05702"},
    {"asentmax",            {.sharpness = LogPower{}, .weight = Entmax{1.5}, .denominator = Nothing{}},               "entmax, sharper with a power of the log of the length",          "arXiv 2506.16640"},
    {"topk",                {.weight = TopK{32}, .denominator = Nothing{}},                                            "softmax of the 32 largest scores",                               "arXiv 2508.17821"},
    {"sa_softmax",          {.weight = SelfAdjusted{}, .denominator = Nothing{}},                                      "softmax times the score's place in its range",                   "arXiv 2502.18277"},
    {"adaptive_temperature",{.sharpness = Adaptive{}},                                                                 "sharper where the row's entropy is high",                        "arXiv 2410.01104"},
}},
{"sinks, caps, gates, positions and masks of softmax", {
    {"softcap",             {.softcap = 50},                                                                           "softmax of scores capped smoothly at 50",                        "arXiv 2408.00118", "gemma2"},
    {"sink",                {.denominator = Sum{.sink = true}},                                                        "softmax with a learned share for no key",                        "arXiv 2508.10925", "gpt_oss attention_sink attention_sinks sinks"},
    {"bias",                {.bias = true},                                                                            "softmax of scores plus a bias of each pair",                     "arXiv 1910.10683", "t5 swin relative_bias"},
    {"alibi",               {.decay = HeadSlope{}},                                                                    "softmax, each head with its own decay by distance",              "arXiv 2108.12409", "", {.rope = false}},
    {"forgetting",          {.decay = TokenGate{}},                                                                    "softmax with forget gates of tokens",                            "arXiv 2503.02130", "fox forgetting_transformer", {.rope = false}},
    {"channel_out_gate",    {.output_gate = true, .channel_gates = true},                                              "softmax, then a gate for each channel",                          "arXiv 2505.06708, elementwise", "gated_attention"},
    {"softpick",            {.weight = Softpick{}, .denominator = Sum{.plus = 1e-6}},                                  "exp − 1 where positive, divided by the sum of |exp − 1|",        "arXiv 2504.20966"},
    {"stick_breaking",      {.weight = StickBreaking{}, .denominator = Nothing{}},                                     "each key takes its share of what later keys left, its own first", "arXiv 2410.17980, with the current token", "sb_attn stickbreaking", {.rope = false}},
    {"two_way_window",      {.mask = Window{64, 64}},                                                                  "softmax of 64 keys on each side",                                "arXiv 2412.13663", "modernbert local_two_way"},
    {"chunk_window",        {.mask = Chunks{128}},                                                                     "softmax within chunks of 128 keys",                              "Llama 4", "chunked_attention"},
    {"streaming",           {.mask = Streaming{4, 128}},                                                               "softmax of the first 4 and the last 128 keys",                   "arXiv 2309.17453", "streaming_llm"},
    {"prefix_lm",           {.mask = Prefix{}},                                                                        "softmax of the past and a prefix that all see",                  "arXiv 1910.10683"},
}},
{"gates of channels, the delta rule, near and far", {
    {"gla",                 {.weight = Power{1}, .decay = ChannelGate{}, .denominator = Nothing{}, .norm = Rms{}, .post_gate = true, .channel_gates = true}, "linear attention, each channel with its own decay", "arXiv 2312.06635", "gated_linear_attention", {.rope = false, .silu_gate = true, .gate_root = 16}},
    {"hgrn2",               {.scale = Fixed{1}, .weight = Power{1}, .decay = ChannelGate{}, .denominator = Nothing{}, .norm = Rms{}}, "the same with keys 1 − gate",                          "arXiv 2404.07904", "", {.rope = false, .tied_keys = true}},
    {"delta",               {.features = Cosine{}, .scale = Fixed{1}, .weight = Power{1}, .values = Delta{}, .denominator = Nothing{}, .norm = Rms{}}, "linear attention that corrects itself", "arXiv 2406.06484", "deltanet delta_net delta_rule", {.short_conv = 4, .rope = false}},
    {"delta_negative",      {.features = Cosine{}, .scale = Fixed{1}, .weight = Power{1}, .values = Delta{2}, .denominator = Nothing{}, .norm = Rms{}}, "the same, corrections up to twice as far", "arXiv 2411.12537", "deltanet_negative", {.short_conv = 4, .rope = false}},
    {"gated_delta",         {.features = Cosine{}, .scale = Fixed{1}, .weight = Power{1}, .decay = TokenGate{}, .values = Delta{}, .denominator = Nothing{}, .norm = Rms{}, .post_gate = true, .channel_gates = true}, "the delta rule with decay", "arXiv 2412.06464", "gdn gated_deltanet gated_delta_net", {.short_conv = 4, .rope = false, .silu_gate = true, .gate_root = 16}},
    {"kda",                 {.features = Cosine{}, .scale = Fixed{1}, .weight = Power{1}, .decay = ChannelGate{}, .values = Delta{}, .denominator = Nothing{}, .norm = Rms{}, .post_gate = true, .channel_gates = true}, "the delta rule, each channel with its own decay", "arXiv 2510.26692", "kimi_delta_attention kimi_linear", {.short_conv = 4, .rope = false, .gate_root = 16}},
    {"delta_exp",           {.features = Cosine{}, .scale = Fixed{1}, .values = Delta{}, .denominator = Nothing{}, .norm = Rms{}}, "the delta rule for exp",                                     "Horner, after arXiv 2505.19488"},
    {"hedgehog",            {.features = Hedgehog{64}, .scale = Fixed{1}, .weight = Power{1}},                         "linear attention on learned softmax features",                   "arXiv 2402.04347"},
    {"lolcats",             {.features = Hedgehog{64}, .scale = Fixed{1}, .weight = Power{1}, .near = Window{64}, .near_share = true}, "exp for the last 64 keys up to a learned share, hedgehog features for the others", "arXiv 2410.10254"},
}},
};
static constexpr const char* kOrders = "orders of the series, and their members";

// The mean weight of an even order is at least the least value of its polynomial, which an odd order
// gets as a floor: that of the next even order. At its least, the polynomial without its last term,
// its derivative, is 0, and it is that term. Above order 20 the floor would be below 0.002.
static Sum floored(int order) {
  constexpr int kHighest = 20;
  if (order % 2 == 0 || order < 0 || order > kHighest) return {};
  double x = -1;
  for (int step = 0; step < 100; ++step) {  // Newton
    double y = 1, slope = 0;
    for (int n = order; n > 0; --n) slope = slope * x / n + y / n, y = 1 + y * x / n;
    x -= y / slope;
  }
  double least = 1;
  for (int n = 1; n <= order + 1; ++n) least *= x / n;
  return {.floor = least};
}

static const Family kFamilies[] = {
    {"taylor",         [](int n) { return Spec{.weight = Taylor{n}, .denominator = floored(n)}; },                                                  "softmax, cut at order n",                "arXiv 2507.23632", {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20, 40, 80}},
    {"raw_taylor",     [](int n) { return Spec{.weight = Taylor{n}}; },                                                                             "softmax, cut at order n without a floor for its sum", "arXiv 2507.23632", {1, 3}},
    {"centred_taylor", [](int n) { return Spec{.centred = true, .weight = Taylor{n}, .denominator = floored(n)}; },                                 "the same, about the row's mean score",   "Horner",           {1, 2, 3, 4, 5, 6, 7, 8, 9, 10}},
    {"elu_taylor",     [](int n) { return Spec{.features = Elu1{}, .scale = Fixed{1}, .weight = Taylor{n}}; },                                      "linear_elu with the powers up to n",     "arXiv 2507.23632", {2, 3, 4, 6, 8, 10}},
    {"relu_taylor",    [](int n) { return Spec{.features = Relu{}, .scale = Fixed{1}, .weight = Taylor{n}, .denominator = Sum{.plus = 1e-8}}; },   "linear_relu with the powers up to n",    "arXiv 2507.23632", {2, 3, 4, 6, 8, 10}},
    {"cosine_taylor",  [](int n) { return Spec{.features = Cosine{}, .scale = Fixed{1}, .weight = Taylor{n}, .values = CountPower{}, .denominator = Nothing{}}; }, "linear_cosine with the powers up to n",  "arXiv 2507.23632", {2, 3, 4, 6, 8, 10}},
    {"power",          [](int n) { return Spec{.weight = Power{n}}; },                                                                              "one power alone",                        "arXiv 2507.04239", {2, 4}},
    {"near_taylor",    [](int n) { return Spec{.weight = Taylor{n}, .near = Window{64}, .denominator = floored(n)}; },                             "exp for the last 64 keys, cut at order n for the others", "Horner",      {2}},
    {"near_centred_taylor", [](int n) { return Spec{.centred = true, .weight = Taylor{n}, .near = Window{64}, .denominator = floored(n)}; },        "exp for the last 64 keys, a centred series up to n for the others", "Horner", {2}},
    {"delta_taylor",   [](int n) { return Spec{.features = Cosine{}, .scale = Fixed{1}, .weight = Taylor{n}, .values = Delta{}, .denominator = Nothing{}, .norm = Rms{}}; }, "the delta rule for the series up to n", "Horner", {1, 2, 3}},
    {"topk",           [](int n) { return Spec{.weight = TopK{n}, .denominator = Nothing{}}; },                                                     "softmax of the n largest scores",        "arXiv 2508.17821", {8}},
    {"topk_raw",       [](int n) { return Spec{.weight = TopK{n, false}, .denominator = Nothing{}}; },                                              "softmax, of which the n largest are kept", "arXiv 2508.17821", {8}},
};
// clang-format on

std::span<const Variant> catalog() {
  static const std::vector<Variant> rows = [] {
    std::vector<Variant> all;
    for (const Mechanism& m : kMechanisms)
      for (const Variant& v : m.rows) all.push_back(v), all.back().mechanism = m.title;
    return all;
  }();
  return rows;
}
std::span<const Family> families() {
  return kFamilies;
}

// The member for n; " n " in the family's sentence becomes the number.
static Variant member(const Family& f, int n) {
  std::string about(f.about);
  const std::string number = std::to_string(n);
  for (size_t at; (at = (about + " ").find(" n ")) != about.npos;) about.replace(at + 1, 1, number);
  Variant v{std::string(f.name) + number, f.make(n), about, std::string(f.source)};
  v.mechanism = kOrders;
  return v;
}

std::vector<Variant> variants() {
  std::vector<Variant> all(catalog().begin(), catalog().end());
  for (const Family& f : kFamilies)
    for (int n : f.listed) all.push_back(member(f, n));
  return all;
}

// The name of a row and its aliases.
static std::vector<std::string> names_of(const Variant& v) {
  std::vector<std::string> all{v.name};
  std::istringstream words(v.aliases);
  for (std::string word; words >> word;) all.push_back(word);
  return all;
}

static std::vector<std::string> all_names() {
  std::vector<std::string> all;
  for (const Variant& v : variants()) std::ranges::copy(names_of(v), std::back_inserter(all));
  return all;
}

// "GPT-OSS" as "gpt_oss".
static std::string plain(std::string_view name) {
  std::string out(name);
  for (char& c : out)
    c = c == '-' || c == ' ' ? '_' : char(std::tolower(static_cast<unsigned char>(c)));
  return out;
}

// A row, an alias or a member of a family; with an empty name if there is none.
static Variant look_up(std::string_view name) {
  for (const Variant& v : catalog())
    if (std::ranges::count(names_of(v), name) > 0) return v;
  // "<alias>@code" is the @code row of the variant that has the alias.
  if (name.ends_with("@code")) {
    const Variant plain = look_up(name.substr(0, name.size() - 5));
    return plain.name.empty() || plain.name + "@code" == name ? Variant{}
                                                              : look_up(plain.name + "@code");
  }
  const size_t digits = name.find_last_not_of("0123456789-") + 1;
  int n = 0;
  const auto [end, error] = std::from_chars(name.data() + digits, name.data() + name.size(), n);
  if (error == std::errc::result_out_of_range) n = std::numeric_limits<int>::max();
  if (error == std::errc::invalid_argument || end != name.data() + name.size()) return {};
  for (const Family& f : kFamilies)
    if (name.substr(0, digits) == f.name) return member(f, n);
  return {};
}

// Names in the authors' code that stand for something that cannot be known.
static constexpr std::pair<std::string_view, std::string_view> kRefused[] = {
    {"gated_softmax_plusplus_mamba", "the source of its core is not in the authors' repository"},
    {"gated_softmax_plusplus_mamba2", "the source of its core is not in the authors' repository"},
};

Variant find(std::string_view wanted) {
  const size_t colon = wanted.find(':');
  const std::string_view name = wanted.substr(0, colon);
  for (const auto& [refused, why] : kRefused)
    check(name != refused, "'", name, "' cannot be reproduced: ", why);
  Variant variant = look_up(name);
  if (variant.name.empty()) variant = look_up(plain(name));
  if (variant.name.empty())
    fail("no attention variant '", name, "'; did you mean ",
         quoted(nearest(plain(name), all_names())), "? ('horner list' shows them all)");
  if (colon != std::string_view::npos) {
    variant.spec = with(variant.spec, wanted.substr(colon + 1));
    variant.name = wanted;
  }
  try {
    check_spec(variant.spec);
  } catch (const Error& e) {
    fail("variant '", wanted, "': ", e.what());
  }
  return variant;
}

std::vector<Variant> matching(const std::string& pattern) {
  if (pattern.find('*') == pattern.npos) return {find(pattern)};
  std::vector<Variant> out;
  for (const Variant& v : variants())
    if (std::ranges::any_of(names_of(v), [&](const auto& n) { return matches(pattern, n); }))
      out.push_back(v);
  check(!out.empty(), "no attention variant matches '", pattern, "'; did you mean ",
        quoted(nearest(pattern, all_names())), "? ('horner list' shows them all)");
  return out;
}

std::vector<std::string> notes(const Spec& spec) {
  std::vector<std::string> out;
  // The centred weights of order 1 sum to the count of keys exactly, of those that are far.
  const auto* taylor = std::get_if<Taylor>(&spec.weight);
  const bool sums_to_count =
      spec.centred && taylor && taylor->order == 1 && is<NoDecay>(spec.decay);
  const auto* sum = std::get_if<Sum>(&spec.denominator);
  if (may_be_negative(spec) && sum && !sums_to_count)
    out.push_back(
        sum->floor > 0
            ? "weights of odd order change sign: below its floor, their sum has no gradient"
            : "may be ill-conditioned: weights of odd order change sign, so their sum "
              "can come near 0");
  const bool scale_free = is<L2>(spec.norm) || is<Rms>(spec.norm) || is<Layer>(spec.norm);
  if (spec.output_gate && scale_free)
    out.push_back("its output gate has no effect: the norm after it does not see a row's scale");
  if (is<Count>(spec.denominator) && scale_free)
    out.push_back("its denominator has no effect: the norm after it does not see a row's scale");
  if (is<Exp>(spec.weight) && spec.clamp == kNoClamp && !is<Sum>(spec.denominator) && !scale_free)
    out.push_back("may overflow: its weights have no bound");
  if (is<Adaptive>(spec.sharpness)) out.push_back("no gradient flows through the temperature");
  return out;
}

}  // namespace horner::attn
