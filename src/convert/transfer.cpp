#include "convert/transfer.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include "nn/slots.h"

namespace horner::convert {

nn::Model make_student(const nn::Model& teacher, const Assignment& forms, int64_t near,
                       uint64_t seed) {
  nn::Model out{converted_config(teacher.config, forms, near)};
  nn::Model from = teacher;
  std::map<std::string, at::Tensor> known;
  for (const nn::Slot& s : nn::slots(from)) known[s.unique_name()] = *s.at;
  for (const nn::Slot& s : nn::slots(out)) {
    const auto found = known.find(s.unique_name());
    *s.at = found != known.end() ? found->second
                                 : nn::random_start(s, seed).to(teacher.embedding.device());
  }
  if (out.config.tied) out.head = out.embedding;
  return out;
}

// Whether a head of the student differs from the teacher's.
static std::vector<bool> converted_heads(const nn::Model& teacher, const nn::Model& student,
                                         size_t layer) {
  const nn::LayerConfig& l = student.config.layers[layer];
  std::vector<bool> out(size_t(student.config.H), false);
  if (l.variant == teacher.config.layers[layer].variant) return out;
  for (const nn::Part& p : l.parts)
    for (const int64_t h : p.heads)
      if (p.variant != teacher.config.layers[layer].variant) out[size_t(h)] = true;
  return out;
}

// The relative squared error of each head of a layer, [H], given to `look`.
static void for_errors(const nn::Model& teacher, const nn::Model& student, const at::Tensor& tokens,
                       nn::Run run,
                       const std::function<void(size_t layer, const std::vector<bool>& converted,
                                                const at::Tensor& errors)>& look) {
  const bool learns = c10::GradMode::is_enabled();
  const c10::NoGradGuard none;
  at::Tensor rows;
  nn::Probe probe;
  probe.input = [&](int64_t, const at::Tensor& x) { rows = x; };
  probe.attention = [&](const nn::Operated& o) {
    const auto layer = size_t(o.layer);
    const std::vector<bool> converted = converted_heads(teacher, student, layer);
    if (std::ranges::count(converted, true) == 0) return;
    const c10::AutoGradMode mode(learns);
    const at::Tensor y = nn::heads_of_layer(student, layer, rows, o.in);
    const at::Tensor want = o.result.to(at::kFloat);
    const at::Tensor errors = (y.to(at::kFloat) - want).square().sum({0, 2, 3}) /
                              want.square().sum({0, 2, 3}).clamp_min(1e-20);
    look(layer, converted, errors);
  };
  run.probe = &probe;
  nn::hidden(teacher, tokens, run);
}

std::vector<std::vector<double>> output_errors(const nn::Model& teacher, const nn::Model& student,
                                               const at::Tensor& tokens, const nn::Run& run) {
  std::vector<std::vector<double>> out(teacher.layers.size(),
                                       std::vector<double>(size_t(teacher.config.H), 0));
  const c10::NoGradGuard none;
  for_errors(teacher, student, tokens, run,
             [&](size_t layer, const std::vector<bool>& converted, const at::Tensor& errors) {
               for (size_t h = 0; h < converted.size(); ++h)
                 if (converted[h]) out[layer][h] = errors[int64_t(h)].item<double>();
             });
  return out;
}

std::vector<double> transfer(const Task& t, nn::Model& student, int64_t steps,
                             const std::filesystem::path& file, const std::string& what) {
  const std::vector<Tuned> own = own_weights(student);
  Tuner tuner(own, own.empty() ? 0 : steps, t.s.transfer_rate, file);
  tune(tuner, t.hooks, what, [&](int64_t step) {
    const at::Tensor tokens = t.sequences(uint64_t(step * t.s.batch), t.s.batch, t.s.length);
    at::Tensor sum = at::zeros({}, at::TensorOptions(tokens.device()).dtype(at::kDouble));
    int64_t heads = 0;
    const c10::AutoGradMode learns(true);
    for_errors(t.teacher, student, tokens, t.run,
               [&](size_t, const std::vector<bool>& converted, const at::Tensor& errors) {
                 std::vector<int64_t> some;
                 for (size_t h = 0; h < converted.size(); ++h)
                   if (converted[h]) some.push_back(int64_t(h));
                 const at::Tensor index = at::tensor(some, at::kLong).to(errors.device());
                 const at::Tensor loss = errors.index_select(0, index).sum();
                 if (loss.requires_grad()) loss.backward();
                 sum += loss.detach().to(at::kDouble), heads += int64_t(some.size());
               });
    return sum / double(std::max<int64_t>(1, heads));
  });
  return tuner.losses();
}

}  // namespace horner::convert
