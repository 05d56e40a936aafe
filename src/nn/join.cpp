#include "nn/join.h"

#include <ATen/ATen.h>

#include <functional>

#include "attn/join.h"

namespace horner::nn {

static constexpr at::Tensor LayerState::* kBesides[] = {
    &LayerState::inputs, &LayerState::projections, &LayerState::decay};

static LayerState changed(LayerState s, const std::function<attn::State(const attn::State&)>& part,
                          const std::function<at::Tensor(const at::Tensor&)>& besides) {
  for (attn::State& x : s.parts) x = part(x);
  for (const auto x : kBesides)
    if ((s.*x).defined()) s.*x = besides(s.*x);
  return s;
}

LayerState snapshot(const LayerState& s) {
  return changed(s, attn::snapshot, [](const at::Tensor& x) { return x.clone(); });
}

LayerState select(const LayerState& s, const at::Tensor& rows) {
  return changed(
      s, [&](const attn::State& x) { return attn::select(x, rows); },
      [&](const at::Tensor& x) { return x.index_select(0, rows.to(x.device())); });
}

LayerState joined(const std::vector<LayerState>& states) {
  LayerState out = states.at(0);
  for (size_t i = 0; i < out.parts.size(); ++i) {
    std::vector<attn::State> parts;
    for (const LayerState& s : states) parts.push_back(s.parts[i]);
    out.parts[i] = attn::joined(parts);
  }
  for (const auto x : kBesides) {
    const auto like = std::ranges::find_if(states, [&](const auto& s) { return (s.*x).defined(); });
    if (like == states.end()) continue;
    std::vector<at::Tensor> all;
    for (const LayerState& s : states) {
      std::vector<int64_t> shape = ((*like).*x).sizes().vec();
      shape[0] = s.parts[0].shape.B;
      all.push_back((s.*x).defined() ? s.*x : at::zeros(shape, ((*like).*x).options()));
    }
    out.*x = at::cat(all);
  }
  return out;
}

std::string why_not_joined(const ModelConfig& c) {
  for (const LayerConfig& l : c.layers)
    for (const Part& p : l.parts)
      if (std::string reason = attn::why_not_joined(p.attention); !reason.empty()) return reason;
  return "";
}

}  // namespace horner::nn
