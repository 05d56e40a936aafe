// The five algorithms of arXiv 2508.17821 and common attention metrics, for every head of a model
// on one text. Rows are streamed (rows.h); in a causal model the rows of a shorter text are the
// first rows of a longer one, so one pass serves every length.
#pragma once

#include <map>
#include <string>

#include "diag/coverage.h"
#include "diag/geometry.h"
#include "diag/growth.h"
#include "diag/jacobian.h"
#include "diag/series.h"
#include "nn/model.h"

namespace horner::diag {

enum class Embedding { tokens, inputs, values };
Embedding embedding_of(const std::string& name);
const char* name_of(Embedding);

struct Settings {
  std::vector<int64_t> lengths = {32, 64, 128, 256, 512, 1024};  // ascending
  std::vector<int64_t> tops = {1, 5, 10, 20, 100};
  std::vector<double> temperatures = {0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10};
  std::vector<double> epsilons = {1e-3, 1e-1, 10};
  Embedding embedding = Embedding::tokens;  // reproduces the paper's figures
  bool unit = false;                        // normalize points for distances, too
  double level = 0.01;                      // of the Kolmogorov-Smirnov test
  std::vector<int64_t> layers, heads;       // to measure; empty: all
  uint64_t seed = 0;
};

// Weighted sums over rows.
struct DistanceSums {
  double rows = 0, distance = 0, bound = 0, expected = 0, gap = 0, permuted = 0;
};
struct SeparationSums {
  double rows = 0, share = 0, lower_markov = 0, lower = 0, upper_hoeffding = 0, upper_mean = 0,
         upper = 0;
};
// g(T, eps) for every temperature and epsilon, [temperature][epsilon].
struct Sensitivity {
  std::vector<std::vector<double>> mean, most;  // over rows; of the most sensitive row
  double rows = 0;
};
struct Head {
  int64_t layer, head;
  std::vector<std::vector<DistanceSums>> distances;  // [length][grid]
  std::vector<SeparationSums> separations;           // [separable], at the largest length
  // By the scores x = scale q.k of the model; and, over every fourth row, by raw products q.k, the
  // paper's logits: T, eps and 1/g are then 1 / scale times as large.
  Sensitivity sensitivity, raw_sensitivity;
  double scale = 1;
  std::vector<Growth> growth;  // [fraction]
  Line law;                    // log largest weight against log n
  // means over rows
  double rows = 0, entropy = 0, entropy_ratio = 0, support = 0, first = 0, reach = 0, largest = 0,
         spread = 0;
  HeadSeries series;
  std::vector<double> picture;  // [kPicture, kPicture], mean weights of blocks of queries and keys

  double temperature() const {
    return 1 / spread;
  }  // at which scores of standard deviation 1 look like these
};
inline constexpr int64_t kPicture = 48;

// How often a bound was violated, and how often it was tested (rows times N or T and eps).
struct Crossed {
  int64_t times = 0, of = 0;
};

struct Critical {
  int64_t length, N;  // -1: rejected for every N
  double p;           // at that N
};

// |J| of a normaliser and the bounds of Lemma 2, for a few rows of every head.
struct JacobianRows {
  std::string name;
  attn::Spec spec;
  std::vector<Jacobian> rows = {};
};

struct Diagnosis {
  Settings settings;
  int64_t tokens = 0;
  std::string attention;                 // the model's own operator, as its config names it
  std::vector<std::string> variants;     // of each layer
  std::string layers_text;               // which layers have which; "" if all have the same
  bool softmax = true;                   // all layers measured have softmax weights
  std::vector<int64_t> grid, separable;  // N of distances, N of separations
  std::vector<Head> heads;
  std::vector<Coverage> coverage;       // of each layer and each N of `separable`
  std::vector<JacobianRows> jacobians;  // the model's own operator first, if Lemma 2 applies
  std::map<std::string, Crossed> crossed;
};

// Receives the current part, for a progress line.
using Say = std::function<void(const std::string&)>;

// tokens [T], T at least the largest length. Measures the layers of the settings, or all that have
// weights to analyse. Throws if one of the settings or every layer has none.
Diagnosis diagnose(const nn::Model&, const at::Tensor& tokens, const Settings&, const Say& = {});

// Algorithm 3: the least N of the grid at which the test does not distinguish the heads' mean
// distances from their expectations at `level`.
enum class Reading { A, B };
std::vector<Critical> critical(const Diagnosis&, Reading, double level);

// Tokens as points [T, C]: the input of the first layer.
at::Tensor token_points(const nn::Model&, const at::Tensor& tokens);

}  // namespace horner::diag
