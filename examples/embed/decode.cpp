// Decodes a stream of tokens with a state of fixed size: every one takes the same time and memory.
#include <ATen/ATen.h>
#include <horner.h>

#include <iostream>

int main() {
  horner::State state =
      horner::make_state(horner::find("taylor2").spec, {.B = 1, .G = 4, .D = 16, .E = 32});
  while (state.tokens < 1000) {
    const at::Tensor q = at::randn({1, 8, 1, 16}), k = at::randn({1, 4, 1, 16});
    const at::Tensor o = step(state, {.q = q, .k = k, .v = at::randn({1, 4, 1, 32})});
    if (state.tokens % 250 == 0)
      std::cout << state.tokens << " tokens in " << bytes(state) << " bytes: " << o.sizes() << "\n";
  }
}
