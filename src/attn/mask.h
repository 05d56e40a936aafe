// The masks of spec.h, and the keys that each shows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <variant>

namespace horner::attn {

// mask: the keys that a query may see. Query t of T stands at position p = t + S - T: the last
// query at the last of the S keys.
struct Full {};
struct Causal {};
struct Window {  // the last `size` keys, its own among them, and `ahead` keys after it
  int size = 128;
  int ahead = 0;
};
struct Chunks {  // the past keys of its own chunk of `size` keys
  int size = 128;
};
struct Streaming {  // the first `first` keys and the last `size`
  int first = 4;
  int size = 1024;
};
struct Prefix {};  // the past, and the first prefix_b keys of sequence b
using Mask = std::variant<Full, Causal, Window, Chunks, Streaming, Prefix>;

// The keys of position p: the interval of `back` keys up to its own and `ahead` keys after it,
// within its chunk and [0, S), and besides them the first `first` keys.
struct Reach {
  int back, ahead;
  int chunk = 0;  // tokens; 0: no chunks
  int first = 0;
  bool prefix = false;  // `first` is an input
};
inline constexpr int kAllKeys = std::numeric_limits<int>::max();
struct ReachOf {
  constexpr Reach operator()(Full) const { return {kAllKeys, kAllKeys}; }
  constexpr Reach operator()(Causal) const { return {kAllKeys, 0}; }
  constexpr Reach operator()(Window m) const { return {m.size, m.ahead}; }
  constexpr Reach operator()(Chunks m) const {
    return {.back = m.size, .ahead = 0, .chunk = m.size};
  }
  constexpr Reach operator()(Streaming m) const {
    return {.back = m.size, .ahead = 0, .first = m.first};
  }
  constexpr Reach operator()(Prefix) const {
    return {.back = kAllKeys, .ahead = 0, .prefix = true};
  }
};
inline Reach reach(const Mask& m) {
  return std::visit(ReachOf{}, m);
}
inline bool sees_future(const Mask& m) {
  return reach(m).ahead > 0 || reach(m).prefix;
}
inline bool sees_all_past(const Mask& m) {
  return reach(m).back == kAllKeys;
}
// Whether every query sees one interval of keys, the same in every sequence of a batch.
inline bool is_interval(const Mask& m) {
  return reach(m).first == 0 && !reach(m).prefix;
}
struct Interval {
  int64_t lo, hi;  // lo <= s < hi
};
// Without the first keys of Streaming and Prefix.
inline Interval interval(const Mask& m, int64_t t, int64_t S, int64_t T) {
  const Reach r = reach(m);
  const int64_t past = t + S - T + 1;
  int64_t lo = std::max<int64_t>(0, past - r.back);
  if (r.chunk > 0 && past > 0) lo = (past - 1) / r.chunk * r.chunk;
  return {lo, std::clamp<int64_t>(past + r.ahead, 0, S)};
}

}  // namespace horner::attn
