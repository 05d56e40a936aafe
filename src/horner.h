// Horner in another program: #include <horner.h>, link horner::horner. Everything is in namespace
// horner; the headers below document shapes and formulas, docs/cpp.md is an introduction.
//   const Spec spec = find("taylor2").spec;                      a variant is a value
//   at::Tensor o = attend(spec, {.q = q, .k = k, .v = v});       all tokens at once, differentiable
//   State s = make_state(spec, {.B = 1, .G = 8, .D = 64, .E = 64});
//   at::Tensor o = step(s, {.q = q, .k = k, .v = v});            the next tokens of a stream
#pragma once

#include "attn/attend.h"
#include "attn/catalog.h"
#include "attn/join.h"
#include "attn/plan.h"
#include "attn/rollback.h"
#include "attn/spec.h"
#include "attn/state.h"
#include "core/check.h"

namespace horner {

const char* version();        // "0.1.0"
const char* torch_version();  // the torch that this library was built with: "2.13.0+cpu"

// Operators as data (attn/spec.h), and those with a name (attn/catalog.h).
using attn::find;  // "taylor4", "softmax:norm=l2,mask=window(64)"
using attn::Spec;
using attn::Variant;
using attn::variants;

// All tokens at once (attn/attend.h).
using attn::attend;
using attn::Execution;
using attn::executions;
using attn::Inputs;
using attn::Statistics;

// A stream of tokens (attn/state.h): a state of fixed size if the variant has one, otherwise a KV
// cache.
using attn::bytes;
using attn::flush;
using attn::joined;
using attn::load_state;
using attn::make_state;
using attn::Mark;
using attn::mark;
using attn::merge;
using attn::save;
using attn::select;
using attn::snapshot;
using attn::State;
using attn::StateShape;
using attn::step;
using attn::undo;
using attn::why_not_joined;

// The size of a state, before there is one (attn/plan.h).
using attn::decode_crossover;
using attn::feature_count;
using attn::state_bytes;
using attn::why_no_state;

// All of them throw horner::Error: what was expected, what was given, what is possible.

}  // namespace horner
