// The words of every alternative of every stage: its name, its parameters with their ranges
// (spec_text.cpp prints, parses and checks them). symbols.h has its formula.
#pragma once

#include "attn/spec.h"

namespace horner::attn {

template <class T>
struct Parameter {
  const char* name;
  T& value;
  double least, most;
};
inline Parameter<bool> flag(const char* name, bool& value) {
  return {name, value, 0, 1};
}

// clang-format off
template <class V> void describe(Identity&, V&& v)       { v("identity"); }
template <class V> void describe(Elu1&, V&& v)           { v("elu1"); }
template <class V> void describe(Relu&, V&& v)           { v("relu"); }
template <class V> void describe(Cosine& s, V&& v)       { v("cosine", flag("over_heads", s.over_heads)); }
template <class V> void describe(Project& s, V&& v)      { v("project", Parameter<int>{"dim", s.dim, 1, 1024}); }
template <class V> void describe(Hedgehog& s, V&& v)     { v("hedgehog", Parameter<int>{"dim", s.dim, 1, 1024}); }
template <class V> void describe(RootDim&, V&& v)        { v("root_dim"); }
template <class V> void describe(Fixed& s, V&& v)        { v("fixed", Parameter<double>{"factor", s.factor, -1e6, 1e6}); }
template <class V> void describe(Flat&, V&& v)           { v("flat"); }
template <class V> void describe(LogLength&, V&& v)      { v("log_length"); }
template <class V> void describe(LogPower&, V&& v)       { v("log_power"); }
template <class V> void describe(Adaptive&, V&& v)       { v("adaptive"); }
template <class V> void describe(Exp&, V&& v)            { v("exp"); }
template <class V> void describe(Taylor& s, V&& v)       { v("taylor", Parameter<int>{"order", s.order, 0, 170}); }
template <class V> void describe(Power& s, V&& v)        { v("power", Parameter<int>{"degree", s.degree, 0, 170}); }
template <class V> void describe(Sigmoid&, V&& v)        { v("sigmoid"); }
template <class V> void describe(Entmax& s, V&& v)       { v("entmax", Parameter<double>{"alpha", s.alpha, 1.01, 2}); }
template <class V> void describe(TopK& s, V&& v)         { v("topk", Parameter<int>{"k", s.k, 1, 1 << 30}, flag("renormalise", s.renormalise)); }
template <class V> void describe(SelfAdjusted&, V&& v)   { v("self_adjusted"); }
template <class V> void describe(Softpick&, V&& v)       { v("softpick"); }
template <class V> void describe(StickBreaking&, V&& v)  { v("stick_breaking"); }
template <class V> void describe(Full&, V&& v)           { v("full"); }
template <class V> void describe(Causal&, V&& v)         { v("causal"); }
template <class V> void describe(Window& s, V&& v)       { v("window", Parameter<int>{"size", s.size, 1, 1 << 30}, Parameter<int>{"ahead", s.ahead, 0, 1 << 30}); }
template <class V> void describe(Chunks& s, V&& v)       { v("chunks", Parameter<int>{"size", s.size, 1, 1 << 30}); }
template <class V> void describe(Streaming& s, V&& v)    { v("streaming", Parameter<int>{"first", s.first, 0, 1 << 30}, Parameter<int>{"size", s.size, 1, 1 << 30}); }
template <class V> void describe(Prefix&, V&& v)         { v("prefix"); }
template <class V> void describe(NoKeys&, V&& v)         { v("none"); }
template <class V> void describe(NoDecay&, V&& v)        { v("none"); }
template <class V> void describe(TokenGate&, V&& v)      { v("token_gate"); }
template <class V> void describe(HeadSlope&, V&& v)      { v("slope"); }
template <class V> void describe(ChannelGate&, V&& v)    { v("channel_gate"); }
template <class V> void describe(AsGiven&, V&& v)        { v("as_given"); }
template <class V> void describe(CountPower&, V&& v)     { v("count_power"); }
template <class V> void describe(Delta& s, V&& v)        { v("delta", Parameter<double>{"most", s.most, 0, 2}); }
template <class V> void describe(Sum& s, V&& v)          { v("sum", Parameter<double>{"plus", s.plus, 0, 1e6}, Parameter<double>{"least", s.least, 0, 1e6}, Parameter<double>{"floor", s.floor, 0, 1}, flag("detach", s.detach), flag("sink", s.sink)); }
template <class V> void describe(Count&, V&& v)          { v("count"); }
template <class V> void describe(CumulativeGate& s, V&& v) { v("cumulative_gate", Parameter<double>{"least", s.least, 0, 1e6}, flag("times_count", s.times_count)); }
template <class V> void describe(Nothing&, V&& v)        { v("nothing"); }
template <class V> void describe(NoNorm&, V&& v)         { v("none"); }
template <class V> void describe(L2& s, V&& v)           { v("l2", flag("times_dim", s.times_dim)); }
template <class V> void describe(Rms& s, V&& v)          { v("rms", Parameter<double>{"eps", s.eps, 0, 1}); }
template <class V> void describe(Layer& s, V&& v)        { v("layer", Parameter<double>{"eps", s.eps, 0, 1}); }
// clang-format on

}  // namespace horner::attn
