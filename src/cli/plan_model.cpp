// horner plan --model DIR: what decoding with a model keeps, by layer and by context length.
#include <cmath>

#include "cli/model.h"
#include "cli/plan_train.h"
#include "cli/run.h"
#include "cli/table.h"
#include "core/check.h"
#include "files/json.h"
#include "nn/model.h"

namespace horner::cli {

Outcome plan_model(const std::string& given, const std::string& dtype, bool json) {
  const nn::ModelConfig c = nn::model_config(files::read_json(model_folder(given) / "config.json"));
  const at::ScalarType type = cli::dtype(dtype);
  std::vector<int64_t> lengths;
  for (int64_t n = 1 << 10; n <= 1 << 20; n *= 4) lengths.push_back(n);
  Table t{.head = {"layer", "heads", "variant"}, .right = {}};
  for (size_t i = 0; i < lengths.size(); ++i) {
    t.head.push_back(count_text(double(lengths[i])) + " tokens");
    t.right.push_back(int(3 + i));
  }
  std::vector<double> sums(lengths.size(), 0);
  Json parts = Json::array();
  for (size_t i = 0; i < c.layers.size(); ++i)
    for (const nn::Part& p : c.layers[i].parts) {
      std::vector<std::string> row{std::to_string(i), std::to_string(p.heads.size()), p.variant};
      std::vector<double> bytes;
      for (size_t n = 0; n < lengths.size(); ++n) {
        bytes.push_back(nn::kept_bytes(c, p, type, lengths[n]));
        sums[n] += bytes.back();
        row.push_back(size_text(bytes.back()));
      }
      t.rows.push_back(row);
      parts.push_back({{"layer", i}, {"heads", p.heads}, {"variant", p.variant}, {"bytes", bytes}});
    }
  std::vector<std::string> all{"all", "", ""};
  for (const double sum : sums) all.push_back(size_text(sum));
  t.rows.push_back(all);
  if (json)
    return print_json({{"dtype", dtype}, {"tokens", lengths}, {"parts", parts}, {"bytes", sums}});
  std::cout << text(t);
  return Outcome::fine;
}

}  // namespace horner::cli
