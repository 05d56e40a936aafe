// For model_test.py and bench/model.py. Tokens [B, T] and results are safetensors files.
//   model_tool new PRESET VARIANT SEED FOLDER [JSON]   a random model, with fields of config.json
//   model_tool copy FOLDER FOLDER                load and save
//   model_tool logits FOLDER TOKENS OUT          logits of the tokens
//   model_tool stream FOLDER TOKENS OUT N        the same: a prompt of N tokens, then one by one
//   model_tool variants PRESET SEED FOLDER TOKENS OUT N VARIANT...
//                                                new, logits and stream of each, in one process
//   model_tool loss FOLDER TOKENS OUT [DTYPE]    the loss of the next tokens, and its gradients
//   model_tool steps FOLDER TOKENS DTYPE         for each line of input one training step: prints
//                                                its seconds and loss
//   model_tool times FOLDER TOKENS               for each line of input (load, logits or decode N):
//                                                prints its seconds and a value
#include <ATen/ATen.h>
#include <ATen/ops/_fused_adamw.h>
#include <c10/core/GradMode.h>

#include <iostream>
#include <list>

#include "core/check.h"
#include "core/pages.h"
#include "core/stopwatch.h"
#include "files/tensors_file.h"
#include "nn/checkpoint.h"
#include "nn/generate.h"

using namespace horner;

static at::Tensor stream(const nn::Model& m, const at::Tensor& tokens, int64_t prompt) {
  std::vector<nn::LayerState> states = nn::empty_states(m, tokens.size(0));
  std::vector<at::Tensor> parts;
  int64_t from = 0;
  for (int64_t to = prompt; to <= tokens.size(1); ++to) {
    parts.push_back(nn::hidden(m, tokens.narrow(1, from, to - from), {.states = &states}));
    from = to;
  }
  return at::cat(parts, 1);
}

static at::ScalarType dtype_of(const std::string& name) {
  check(name == "float32" || name == "bfloat16", "no dtype '", name, "': float32 or bfloat16");
  return name == "float32" ? at::kFloat : at::kBFloat16;
}

static at::Tensor loss_of(const nn::Model& m, const at::Tensor& tokens, at::ScalarType compute) {
  const int64_t n = tokens.size(1) - 1;
  const at::Tensor x = nn::hidden(m, tokens.narrow(1, 0, n), {.compute = compute});
  return nn::cross_entropy(m, x.reshape({-1, x.size(-1)}), tokens.narrow(1, 1, n).reshape({-1}));
}

static std::vector<at::Tensor> leaves(nn::Model& m) {
  std::vector<at::Tensor> out;
  for (const nn::Slot& s : nn::slots(m)) out.push_back(*s.at = s.at->clone().requires_grad_(true));
  if (m.config.tied) m.head = m.embedding;
  return out;
}

static files::TensorsFile loss(nn::Model m, const at::Tensor& tokens, at::ScalarType compute) {
  leaves(m);
  const at::Tensor l = loss_of(m, tokens, compute);
  l.backward();
  std::list<at::Tensor> gradients;
  std::vector<nn::Slot> learned;
  for (nn::Slot s : nn::slots(m))
    if (s.at->grad().defined()) s.at = &gradients.emplace_back(s.at->grad()), learned.push_back(s);
  files::TensorsFile out = nn::stored_tensors(learned);
  out.tensors["loss"] = l.detach();
  return out;
}

static void steps(nn::Model m, const at::Tensor& tokens, at::ScalarType compute) {
  keep_pages();
  std::vector<at::Tensor> weights = leaves(m), first, second, counts;
  for (const at::Tensor& w : weights) {
    first.push_back(at::zeros_like(w)), second.push_back(at::zeros_like(w));
    counts.push_back(at::zeros({}, at::kFloat));
  }
  for (std::string line; std::getline(std::cin, line);) {
    Stopwatch watch;
    for (at::Tensor& w : weights) w.mutable_grad() = at::Tensor();
    const at::Tensor l = loss_of(m, tokens, compute);
    l.backward();
    const c10::NoGradGuard without_gradients;
    std::vector<at::Tensor> gradients;
    for (size_t i = 0; i < weights.size(); ++i) {
      gradients.push_back(weights[i].grad());
      counts[i].add_(1);
    }
    at::_fused_adamw_(weights, gradients, first, second, {}, counts, 1e-4, 0.9, 0.95, 0.1, 1e-8,
                      false, false);
    const double value = l.item<double>(), seconds = watch.ms() / 1e3;
    std::cout << seconds << " " << value << std::endl;
  }
}

static double timed(const std::string& line, nn::Model& m, const std::string& folder,
                    const at::Tensor& tokens) {
  if (line == "load") {
    m = nn::load_model(folder);
    return double(nn::parameter_count(m));
  }
  if (line == "logits") {
    const c10::NoGradGuard without_gradients;
    return nn::logits(m, nn::hidden(m, tokens)).select(1, -1).max().item<double>();
  }
  check(line.starts_with("decode "), "no '", line, "' to time: load, logits or decode N");
  const std::vector<int64_t> prompt(tokens.data_ptr<int64_t>(),
                                    tokens.data_ptr<int64_t>() + tokens.numel());
  m.config.ends.clear();
  return nn::generate(m, {{prompt, std::stoll(line.substr(7))}}, {.temperature = 0}, 1,
                      [](size_t, const nn::Generated&) { return true; })
      .seconds;
}

static void times(const std::string& folder, const at::Tensor& tokens) {
  keep_pages();
  nn::Model m = nn::load_model(folder);
  for (std::string line; std::getline(std::cin, line);) {
    Stopwatch watch;
    const double value = timed(line, m, folder, tokens);
    std::cout << watch.ms() / 1e3 << " " << value << std::endl;
  }
}

static void save_new(const nn::Json& config, const std::string& seed, const std::string& folder) {
  nn::save_model(nn::random_model(nn::model_config(config), std::stoull(seed)), folder);
}

static void variants(const std::vector<std::string>& a) {
  const c10::NoGradGuard without_gradients;
  const at::Tensor tokens = files::load_tensors(a[4]).tensors.at("tokens");
  files::TensorsFile out;
  for (size_t i = 7; i < a.size(); ++i) {
    save_new(nn::preset(a[1], a[i]).json, a[2], a[3]);
    const nn::Model m = nn::load_model(a[3]);
    out.tensors[a[i] + ".whole"] = nn::logits(m, nn::hidden(m, tokens)).contiguous();
    const at::Tensor x = stream(m, tokens, std::stoll(a[6]));
    out.tensors[a[i] + ".streamed"] = nn::logits(m, x).contiguous();
  }
  files::save_tensors(a[5], out);
}

static int run(const std::vector<std::string>& a) {
  if (a[0] == "copy") return nn::save_model(nn::load_model(a[1]), a[2]), 0;
  if (a[0] == "new") {
    nn::Json config = nn::preset(a[1], a[2]).json;
    if (a.size() > 5) config.merge_patch(nn::Json::parse(a[5]));
    return save_new(config, a[3], a[4]), 0;
  }
  if (a[0] == "variants") return variants(a), 0;
  if (a[0] == "times") return times(a[1], files::load_tensors(a[2]).tensors.at("tokens")), 0;
  const nn::Model m = nn::load_model(a[1]);
  const at::Tensor tokens = files::load_tensors(a[2]).tensors.at("tokens");
  if (a[0] == "loss") {
    const std::string dtype = a.size() > 4 ? a[4] : "float32";
    return files::save_tensors(a[3], loss(m, tokens, dtype_of(dtype))), 0;
  }
  if (a[0] == "steps") return steps(m, tokens, dtype_of(a[3])), 0;
  const c10::NoGradGuard without_gradients;
  const at::Tensor x =
      a[0] == "stream" ? stream(m, tokens, std::stoll(a[4])) : nn::hidden(m, tokens);
  files::save_tensors(a[3], {{{"logits", nn::logits(m, x).contiguous()}}});
  return 0;
}

int main(int argc, char** argv) {
  try {
    return run({argv + 1, argv + argc});
  } catch (const Error& e) {
    std::cerr << e.what() << "\n";
    return 2;
  }
}
