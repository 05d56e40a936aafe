// For model_test.py:
//   model_tool logits FOLDER TOKENS OUT        logits of tokens [B, T], both safetensors files
//   model_tool stream FOLDER TOKENS OUT N      the same, N tokens as a prompt and the rest one by
//   one model_tool copy FOLDER FOLDER              load and save model_tool new PRESET VARIANT SEED
//   FOLDER  a random model model_tool loss FOLDER TOKENS OUT          the loss of each token's
//   next, and its gradients
#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <iostream>

#include "attn/tensors_file.h"
#include "core/check.h"
#include "nn/checkpoint.h"

using namespace horner;

static at::Tensor stream(const nn::Model& m, const at::Tensor& tokens, int64_t prompt) {
  std::vector<attn::State> states = nn::empty_states(m, tokens.size(0));
  std::vector<at::Tensor> parts;
  int64_t from = 0;
  for (int64_t to = prompt; to <= tokens.size(1); ++to) {
    parts.push_back(nn::hidden(m, tokens.narrow(1, from, to - from), {.states = &states}));
    from = to;
  }
  return at::cat(parts, 1);
}

static attn::TensorsFile loss(nn::Model m, const at::Tensor& tokens) {
  attn::TensorsFile out;
  for (const nn::Slot& s : nn::slots(m)) *s.at = s.at->clone().requires_grad_(true);
  const int64_t n = tokens.size(1) - 1;
  const at::Tensor x = nn::hidden(m, tokens.narrow(1, 0, n));
  const at::Tensor l =
      nn::cross_entropy(m, x.reshape({-1, x.size(-1)}), tokens.narrow(1, 1, n).reshape({-1}));
  l.backward();
  out.tensors["loss"] = l.detach();
  for (const nn::Slot& s : nn::slots(m))
    if (s.at->grad().defined() && s.name.find("c_attn") == std::string::npos)
      out.tensors[s.name] = s.at->grad();
  return out;
}

static int run(const std::vector<std::string>& a) {
  if (a[0] == "copy") return nn::save_model(nn::load_model(a[1]), a[2]), 0;
  if (a[0] == "new") {
    nn::save_model(nn::random_model(nn::preset(a[1], a[2]), std::stoull(a[3])), a[4]);
    return 0;
  }
  const nn::Model m = nn::load_model(a[1]);
  const at::Tensor tokens = attn::load_tensors(a[2]).tensors.at("tokens");
  if (a[0] == "loss") return attn::save_tensors(a[3], loss(m, tokens)), 0;
  const c10::NoGradGuard without_gradients;
  const at::Tensor x =
      a[0] == "stream" ? stream(m, tokens, std::stoll(a[4])) : nn::hidden(m, tokens);
  attn::save_tensors(a[3], {{{"logits", nn::logits(m, x).contiguous()}}});
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
