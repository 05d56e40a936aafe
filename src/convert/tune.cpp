#include "convert/tune.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <cmath>
#include <limits>

#include "core/check.h"
#include "core/stopwatch.h"
#include "files/json.h"
#include "files/tensors_file.h"
#include "nn/slots.h"

namespace horner::convert {

std::vector<Tuned> own_weights(nn::Model& m) {
  std::vector<Tuned> out;
  for (const nn::Slot& s : nn::slots(m)) {
    if (!nn::is_of_variant(s)) continue;
    *s.at = s.at->detach().to(at::kFloat).clone();
    if (s.fixed) continue;
    s.at->set_requires_grad(true);
    out.push_back({s.unique_name(), *s.at});
  }
  return out;
}

Tuner::Tuner(std::vector<Tuned> all, int64_t steps, double rate, std::filesystem::path file)
    : file_(std::move(file)) {
  const c10::NoGradGuard none;
  settings_.steps = steps, settings_.learning_rate = rate, settings_.weight_decay = 0;
  settings_.warmup = std::max<int64_t>(1, steps / 10);
  for (size_t i = 0; i < all.size(); ++i) {
    const at::Tensor x = all[i].at.detach();
    optimizer_.parameters.push_back({all[i].name, all[i].at, -1});
    optimizer_.pieces.push_back({i, 0, x, {}, at::zeros_like(x), at::zeros_like(x)});
  }
  check(!all.empty() || steps == 0,
        "nothing learns: no head is converted to a form with weights; choose other forms, or 0 "
        "steps");
  optimizer_.count =
      at::zeros({}, all.empty() ? at::TensorOptions(at::kFloat) : all[0].at.options());
  numbers_ = train::step_numbers(optimizer_);
  numbers_.limits.fill_(std::numeric_limits<float>::max());
  if (!std::filesystem::exists(file_)) return;
  const files::TensorsFile saved = files::load_tensors(file_);
  const auto read = [&](const std::string& name, const at::Tensor& to) {
    const auto found = saved.tensors.find(name);
    check(found != saved.tensors.end() && found->second.sizes() == to.sizes(), file_.string(),
          " does not belong to this conversion: '", name,
          "' is missing or has another shape; remove it, or choose another --out");
    to.copy_(found->second);
  };
  for (const train::Piece& p : optimizer_.pieces) {
    const std::string& name = optimizer_.parameters[p.of].name;
    read(name, p.x), read(name + " mean", p.mean), read(name + " square", p.square);
  }
  read("count", optimizer_.count);
  const Json about = Json::parse(saved.metadata.at("horner"));
  step_ = about.at("step"), losses_ = about.at("losses").get<std::vector<double>>();
}

double Tuner::update(const at::Tensor& loss) {
  numbers_.loss.copy_(loss.detach());
  numbers_.rate.fill_(train::learning_rate(settings_, step_));
  train::update(optimizer_, settings_, numbers_);
  train::clear_gradients(optimizer_);
  const double value = loss.item<double>();
  check(std::isfinite(value), "the loss of step ", step_ + 1,
        " is NaN or infinite; choose a smaller learning rate");
  losses_.push_back(value), ++step_;
  return value;
}

void Tuner::save() const {
  files::TensorsFile out;
  for (const train::Piece& p : optimizer_.pieces) {
    const std::string& name = optimizer_.parameters[p.of].name;
    out.tensors[name] = p.x, out.tensors[name + " mean"] = p.mean;
    out.tensors[name + " square"] = p.square;
  }
  out.tensors["count"] = optimizer_.count;
  out.metadata["horner"] = Json{{"step", step_}, {"losses", losses_}}.dump();
  std::filesystem::create_directories(file_.parent_path());
  files::save_tensors(file_, out);
}

void tune(Tuner& tuner, const Hooks& hooks, const std::string& what,
          const std::function<at::Tensor(int64_t)>& backward) {
  constexpr double kBetweenSaves = 60e3;  // ms
  Stopwatch watch;
  bool saved = false;
  while (!tuner.done()) {
    if (hooks.stop()) {
      tuner.save();
      throw Stopped{};
    }
    std::string line = what + ", step " + std::to_string(tuner.step() + 1);
    if (!tuner.losses().empty()) line += ", loss " + std::to_string(tuner.losses().back());
    hooks.say(line);
    tuner.update(backward(tuner.step()));
    saved = watch.ms() > kBetweenSaves;
    if (saved) tuner.save(), watch = Stopwatch();
  }
  if (!saved) tuner.save();
}

}  // namespace horner::convert
