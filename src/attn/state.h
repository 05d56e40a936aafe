// The state of a stream of tokens, one interface for every variant: sums of fixed size (carry.h)
// and a buffer of the newest tokens where the weight has a finite state, a KV cache where it has
// none.
#pragma once

#include <filesystem>

#include "attn/attend.h"
#include "attn/make_state.h"

namespace horner::attn {

// [B, H, T, E] of tokens that follow `before`, in linear time; writes the sums after them to
// `after`, unless that is null. Gradients flow through all of it. For a variant with a finite
// state.
at::Tensor attend_from(const Spec&, const Inputs&, const Carry& before, Carry* after);

// Adds T tokens and returns their results [B, H, T, E]: many for prefill, one for decoding. The
// same as attending to all tokens so far. Without gradients.
at::Tensor step(State&, const Inputs&);

// Room for n more tokens in a KV cache that is not empty: no step within them makes it larger.
void reserve(State&, int64_t n);

// Folds the buffered tokens into the sums.
void flush(State&);

// Appends the tokens of `later` to those of `state`: the sums add.
void merge(State& state, const State& later);

// As if a stream had `tokens` tokens, by repeating those so far: for measurements. Sums stay as
// they are.
void repeat(State&, int64_t tokens);

int64_t bytes(const State&);  // in use now

void save(const State&, const std::filesystem::path&);  // a safetensors file
State load_state(const std::filesystem::path&);

}  // namespace horner::attn
