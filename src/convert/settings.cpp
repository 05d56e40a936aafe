#include "convert/settings.h"

#include <ATen/ATen.h>

#include "train/batch.h"

namespace horner::convert {

Json to_json(const Settings& s) {
  return {{"model", s.model},
          {"data", s.data},
          {"validation", s.validation},
          {"near", s.near},
          {"forms", s.forms},
          {"layers", s.layers},
          {"share", s.share},
          {"bytes", s.bytes},
          {"keep", s.keep},
          {"tokens", s.tokens},
          {"by", s.by},
          {"measure-tokens", s.measure_tokens},
          {"trial-steps", s.trial_steps},
          {"transfer-steps", s.transfer_steps},
          {"heal-steps", s.heal_steps},
          {"batch", s.batch},
          {"length", s.length},
          {"transfer-rate", s.transfer_rate},
          {"heal-rate", s.heal_rate},
          {"distil", s.distil},
          {"rank", s.rank},
          {"evaluate-sequences", s.evaluate_sequences},
          {"control", s.control},
          {"objections", s.objections},
          {"costs", s.costs},
          {"seed", s.seed},
          {"dtype", s.dtype}};
}

at::Tensor Task::sequences(uint64_t first, int64_t count, int64_t length,
                           train::Split split) const {
  const at::Tensor out =
      train::make_batch(source, split, first, count, count, length, teacher.config.V).tokens[0];
  if (begin >= 0) out.select(1, 0).fill_(begin);
  return out.to(teacher.embedding.device());
}

std::vector<int64_t> Task::layers() const {
  if (!s.layers.empty()) return s.layers;
  std::vector<int64_t> all(teacher.layers.size());
  for (size_t i = 0; i < all.size(); ++i) all[i] = int64_t(i);
  return all;
}

}  // namespace horner::convert
