#include "attn/inputs.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <array>

#include "attn/spec_text.h"
#include "core/check.h"

namespace horner::attn {

std::string dtype_name(at::ScalarType dtype) {
  return std::string(c10::getDtypeNames(dtype).first);
}

static bool always(const Spec&) {
  return true;
}

static bool projects(const Spec& s) {
  return is<Project>(s.features) || is<Hedgehog>(s.features);
}

// clang-format off
static const Input kInputs[] = {
    {"q",                &Inputs::q,                "BHTD", Role::tensor,    always, "queries"},
    {"k",                &Inputs::k,                "BGSD", Role::tensor,    always, "keys"},
    {"v",                &Inputs::v,                "BGSE", Role::tensor,    always, "values"},
    {"decay",            &Inputs::decay,            "BGS",  Role::log_gate,  [](const Spec& s) { return is<TokenGate>(s.decay); },             "log of each token's gate"},
    {"slope",            &Inputs::slope,            "G",    Role::constant,  [](const Spec& s) { return is<HeadSlope>(s.decay); },             "log by which a weight falls per token of distance"},
    {"channel_decay",    &Inputs::channel_decay,    "BGSD", Role::log_gate,  [](const Spec& s) { return is<ChannelGate>(s.decay); },           "log of the gate of each token's channels"},
    {"input_gate",       &Inputs::input_gate,       "BGS",  Role::gate,      [](const Spec& s) { return s.input_gate; },                       "factor of each value"},
    {"beta",             &Inputs::beta,             "BGS",  Role::gate,      [](const Spec& s) { return is<Delta>(s.values); },                "how far each token corrects what its key gives"},
    {"denominator_gate", &Inputs::denominator_gate, "BGS",  Role::logit,     [](const Spec& s) { return is<CumulativeGate>(s.denominator); },  "log of each token's share of the denominator"},
    {"sink",             &Inputs::sink,             "H",    Role::parameter, [](const Spec& s) { const auto* z = std::get_if<Sum>(&s.denominator); return z && z->sink; }, "log of what the denominator adds"},
    {"output_gate",      &Inputs::output_gate,      "BHT",  Role::gate,      [](const Spec& s) { return s.output_gate; },                      "factor of each output, before the norm", "BHTE"},
    {"post_gate",        &Inputs::post_gate,        "BHT",  Role::gate,      [](const Spec& s) { return s.post_gate; },                        "factor of each output, after the norm", "BHTE"},
    {"length_scale",     &Inputs::length_scale,     "H",    Role::parameter, [](const Spec& s) { return is<LogLength>(s.sharpness); },         "s of SSMax"},
    {"log_power",        &Inputs::log_power,        "H3",   Role::parameter, [](const Spec& s) { return is<LogPower>(s.sharpness); },          "delta, beta and gamma of ASEntmax"},
    {"count_exponent",   &Inputs::count_exponent,   "G",    Role::parameter, [](const Spec& s) { return is<CountPower>(s.values); },           "exponent of the count, before a sigmoid"},
    {"near_share",       &Inputs::near_share,       "H",    Role::parameter, [](const Spec& s) { return s.near_share; },                       "the largest weight of a near key, before a sigmoid"},
    {"norm_weight",      &Inputs::norm_weight,      "E",    Role::parameter, [](const Spec& s) { return is<Rms>(s.norm) || is<Layer>(s.norm); }, "weight of the norm"},
    {"norm_bias",        &Inputs::norm_bias,        "E",    Role::parameter, [](const Spec& s) { return is<Layer>(s.norm); },                  "bias of the norm"},
    {"query_projection", &Inputs::query_projection, "HDF",  Role::parameter, projects,            "projection of the queries"},
    {"key_projection",   &Inputs::key_projection,   "GDF",  Role::parameter, projects,            "projection of the keys"},
    {"bias",             &Inputs::bias,             "bhTS", Role::score,     [](const Spec& s) { return s.bias; },                             "what is added to each score"},
    {"prefix",           &Inputs::prefix,           "B",    Role::mask,      [](const Spec& s) { return is<Prefix>(s.mask); },                 "int, how many keys all queries see"},
    {"keep",             &Inputs::keep,             "BS",   Role::mask,      nullptr, "bool, false hides a key"},
    {"cu_seqlens",       &Inputs::cu_seqlens,       "n",    Role::mask,      nullptr, "int, where each packed sequence begins, and the end"},
    {"cu_seqlens_k",     &Inputs::cu_seqlens_k,     "n",    Role::mask,      nullptr, "int, likewise of the keys, where sequences have other numbers of keys than of queries"},
    {"seed",             &Inputs::seed,             "1",    Role::mask,      [](const Spec& s) { return s.dropout != 0; },                     "int64, from which dropout follows"},
};
// clang-format on
static_assert(std::size(kInputs) == kInputCount, "every member of Inputs has one row");

std::span<const Input, kInputCount> input_table() {
  return kInputs;
}

int64_t axis_of(const Input& i, std::string_view letters) {
  const size_t at = std::string_view(i.shape).find_first_of(letters);
  return at == std::string_view::npos ? -1 : int64_t(at);
}

static bool may_be_one(char letter) {
  return std::islower(letter) && letter != 'n';
}

std::string shape_text(const char* shape) {
  std::string out;
  for (const char* c = shape; *c; ++c) {
    const bool one = may_be_one(*c);
    out += (out.empty() ? "" : ", ") + std::string(1, one ? char(std::toupper(*c)) : *c);
    if (one) out += " or 1";
  }
  return "[" + out + "]";
}

Inputs tokens(Inputs in, int64_t from, int64_t to) {
  for (const Input& i : kInputs) {
    at::Tensor& x = in.*i.at;
    const int64_t axis = axis_of(i, "TS");
    if (!x.defined() || axis < 0 || to - from == x.size(axis)) continue;
    x = x.narrow(axis, from, to - from);  // whose gradient is a tensor of the whole size
  }
  return in;
}

// Sizes by letter; -1 until the first input that has the letter sets it. Texts of errors are built
// only when there is an error: this runs at every call.
struct Sizes {
  std::array<int64_t, 128> of;

  Sizes() { of.fill(-1); }
  int64_t& operator[](char letter) { return of[size_t(letter)]; }
};

static void check_shape(const Input& i, const Spec& spec, const at::Tensor& x, Sizes& sizes) {
  const std::string_view shape = attn::shape(i, spec);
  if (x.dim() != int64_t(shape.size()))
    fail(i.name, " must have shape ", shape_text(shape.data()), ", got ", x.sizes());
  for (size_t d = 0; d < shape.size(); ++d) {
    if (shape[d] == 'n') continue;
    const int64_t size = x.size(int64_t(d));
    const bool is_number = std::isdigit(shape[d]);
    int64_t& expected = sizes[char(std::toupper(shape[d]))];
    if (is_number) expected = shape[d] - '0';
    if (expected < 0) expected = size;
    if (size == expected || (size == 1 && may_be_one(shape[d]))) continue;
    const std::string where = is_number ? ""
                                        : std::string(" with ") + char(std::toupper(shape[d])) +
                                              " = " + std::to_string(expected);
    fail(i.name, " must have shape ", shape_text(shape.data()), where, ", got ", x.sizes());
  }
}

static const c10::DispatchKeySet kWrappers =
    c10::DispatchKeySet(
        {c10::DispatchKey::Python, c10::DispatchKey::Functionalize, c10::DispatchKey::Batched}) |
    c10::functorch_transforms_ks;

bool is_wrapped(const at::Tensor& x) {
  return x.key_set().has_any(kWrappers);
}
bool is_transformed(const at::Tensor& x) {
  const c10::impl::LocalDispatchKeySet local = c10::impl::tls_local_dispatch_key_set();
  return is_wrapped(x) || (local.included_ - local.excluded_).has_any(kWrappers);
}

void check_storage(const char* name, const at::Tensor& x) {
  if (x.numel() == 0 || x.is_meta()) return;
  const size_t spanned = at::detail::computeStorageNbytes(x.sizes(), x.strides(), x.itemsize(),
                                                          size_t(x.storage_offset()));
  if (spanned > x.storage().nbytes())
    fail(name, " must be in memory, got a tensor whose storage was freed");
}

// Executions read the memory of a tensor: the numbers have to be there, one after another and as
// they are.
static void check_memory(const Input& i, const at::Tensor& x) {
  using Key = c10::DispatchKey;
  static const c10::DispatchKeySet lazy({Key::Negative, Key::Conjugate, Key::ZeroTensor});
  if (x.layout() != at::kStrided || x.is_nested())
    fail(i.name, " must be a dense tensor, got a ", x.is_nested() ? "nested" : "sparse", " one");
  if (x.key_set().has_any(lazy))
    fail(i.name, " must be in memory, got a view that torch has yet to compute; call clone()");
  if (is_wrapped(x) || !x.has_storage())
    fail(i.name, " must be a plain tensor, got one that a transform of torch or a subclass wraps");
  check_storage(i.name, x);
}

static void check_type(const Input& i, const at::Tensor& x, const Inputs& in) {
  const at::ScalarType dtype = x.scalar_type();
  if (x.device() != in.q.device())
    fail(i.name, " must be on the same device as q (", in.q.device(), "), got ", x.device());
  if (!x.is_cpu() && !x.is_cuda())
    fail(i.name, " must be on the CPU or on a CUDA device, got ", x.device());
  const char* expected = "float64, float32, bfloat16 or float16";
  bool ok =
      dtype == at::kDouble || dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf;
  if (i.at == &Inputs::keep) expected = "bool", ok = dtype == at::kBool;
  if (i.at == &Inputs::cu_seqlens || i.at == &Inputs::cu_seqlens_k || i.at == &Inputs::prefix)
    expected = "int32 or int64", ok = dtype == at::kInt || dtype == at::kLong;
  if (i.at == &Inputs::seed) expected = "int64", ok = dtype == at::kLong;
  if (!ok) fail(i.name, " must have dtype ", expected, ", got ", dtype_name(dtype));
  if (i.role == Role::tensor && dtype != in.q.scalar_type())
    fail("q, k and v must have the same dtype: q is ", dtype_name(in.q.scalar_type()), ", ", i.name,
         " is ", dtype_name(dtype));
  if (i.role == Role::constant && x.requires_grad() && c10::GradMode::is_enabled())
    fail(i.name, " is a constant and must not require a gradient; detach it");
}

static void check_cuts(const char* name, const at::Tensor& c, int64_t last) {
  const int64_t n = c.numel();
  check(n >= 2, name, " must have at least 2 elements, 0 and the length, got ", n);
  if (!c.is_cpu()) return;  // reading it would wait for the device
  const at::Tensor whole = c.to(at::kLong).contiguous();
  const int64_t* at = whole.const_data_ptr<int64_t>();
  check(at[0] == 0 && at[n - 1] == last, name, " must go from 0 to ", last, ", got ", at[0], " to ",
        at[n - 1]);
  for (int64_t i = 1; i < n; ++i)
    check(at[i - 1] <= at[i], name, " must not decrease, got ", at[i - 1], " before ", at[i]);
}

static void check_packing(const Spec& spec, const Inputs& in) {
  const int64_t T = in.q.size(2), S = in.k.size(2);
  check(in.cu_seqlens.defined(), "cu_seqlens_k requires cu_seqlens, which has the queries' cuts");
  check(T == S || in.cu_seqlens_k.defined(), "cu_seqlens requires as many keys as queries, got ", T,
        " queries and ", S, " keys; cu_seqlens_k gives the keys cuts of their own");
  check_cuts("cu_seqlens", in.cu_seqlens, T);
  if (!in.cu_seqlens_k.defined()) return;
  check_cuts("cu_seqlens_k", in.cu_seqlens_k, S);
  check(in.cu_seqlens.numel() == in.cu_seqlens_k.numel(),
        "cu_seqlens and cu_seqlens_k must cut the same number of sequences, got ",
        in.cu_seqlens.numel() - 1, " and ", in.cu_seqlens_k.numel() - 1);
  check(is<NoDecay>(spec.decay) && is<NoKeys>(spec.near) && is<AsGiven>(spec.values),
        "cu_seqlens_k does not support decay, near keys or values that depend on other tokens: "
        "those know one place among the keys for each query");
}

// Logs of gates above 1 grow without bound: no form but the reference can follow them far. Gates in
// the place of their logs have no value below 0, however many there are. Reading them on a GPU
// would wait for it.
static void check_decay(const Inputs& in) {
  constexpr double kMost = 1, kGate = 0.05;
  const at::Tensor& gates = in.decay.defined() ? in.decay : in.channel_decay;
  const char* name = in.decay.defined() ? "decay" : "channel_decay";
  const at::Tensor x = gates.defined() ? gates.detach() : -in.slope.detach();
  if (!x.is_cpu() || x.numel() == 0) return;
  const double most = x.max().item<double>();
  if (!gates.defined()) {
    check(!(most > kMost), "slope must be at least -1, got ", -most);
    return;
  }
  check(!(most > kMost), name, " must hold the logs of gates, at most 1, got ", most,
        "; pass gate.log() for gates in (0, 1)");
  if (most <= kGate) return;
  const at::Tensor finite = x.masked_select(x.isfinite());
  if (finite.numel() == 0 || finite.min().item<double>() < 0) return;
  const double mean = finite.mean(at::kDouble).item<double>();
  check(mean <= kGate, name,
        " must hold the logs of gates, which are below 0 for gates below 1; "
        "no value given is, and their mean is ",
        mean, "; pass gate.log() for gates in (0, 1)");
}

static void check_presence(const Input& i, const Spec& spec, bool given, std::string_view variant) {
  if (!i.wanted || i.wanted(spec) == given) return;
  const std::string user =
      variant.empty() ? "this variant" : "variant '" + std::string(variant) + "'";
  if (given) fail("input '", i.name, "' was given, but ", user, " does not use it");
  fail("missing input '", i.name, "' ", shape_text(shape(i, spec)), " (", i.about,
       "), required by ", user);
}

void check_inputs(const Spec& spec, const Inputs& in, std::string_view variant) {
  check_spec(spec);
  Sizes sizes;
  if (const auto* p = std::get_if<Project>(&spec.features)) sizes['F'] = p->dim;
  if (const auto* p = std::get_if<Hedgehog>(&spec.features)) sizes['F'] = p->dim;
  for (const Input& i : kInputs) {
    const at::Tensor& x = in.*i.at;
    check_presence(i, spec, x.defined(), variant);
    if (!x.defined()) continue;
    check_memory(i, x);
    check_shape(i, spec, x, sizes);
    check_type(i, x, in);
  }
  check(sizes['G'] > 0 && sizes['H'] > 0 && sizes['H'] % sizes['G'] == 0,
        "the heads of q must be a multiple of the heads of k and v, both at least 1, got ",
        sizes['H'], " and ", sizes['G']);
  check(sizes['D'] > 0 && sizes['E'] > 0,
        "head dimensions must be at least 1, got D = ", sizes['D'], " and E = ", sizes['E'],
        ": q is ", in.q.sizes(), ", v is ", in.v.sizes());
  if (in.cu_seqlens.defined() || in.cu_seqlens_k.defined()) check_packing(spec, in);
  if (in.decay.defined() || in.slope.defined() || in.channel_decay.defined()) check_decay(in);
  check(!in.prefix.defined() || !in.cu_seqlens.defined(),
        "a prefix mask does not support packed sequences (cu_seqlens)");
}

}  // namespace horner::attn
