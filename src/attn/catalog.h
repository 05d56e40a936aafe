// Every named attention variant.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "attn/spec.h"

namespace horner::attn {

// What the model around the operator does differently for a variant.
struct Around {
  int short_conv = 0;      // q, k and v are convolved over so many tokens, then SiLU; 0: not
  bool rope = true;        // rotary positions, where the model has them
  bool mamba = false;      // a Mamba-2 block around the sum
  bool raw_decay = false;  // decay of a token: (W x + b) / 1024 of the token before it
  bool exp_gate = false;   // output gate: e^-(W x + b), not its sigmoid
  bool silu_gate = false;  // post gate: y sigmoid(y) of y = W x + b
  bool tied_keys = false;  // gates of channels sigmoid(k), keys 1 - gate, queries SiLU(q)
  int gate_root = 1;       // log gates: log sigmoid(W x + b) over this
};

struct Variant {
  std::string name;
  Spec spec;
  std::string about;
  std::string source;
  std::string aliases = "";  // the field's names and those in the authors' code, by spaces
  Around around = {};
  std::string_view mechanism = {};  // the group of the catalog
};

// A variant for every n: "taylor<n>".
struct Family {
  std::string_view name;  // without the number
  Spec (*make)(int n);
  std::string_view about, source;
  std::vector<int> listed;  // the members that `horner list` shows; any other n is valid too
};

std::span<const Variant> catalog();
std::span<const Family> families();
std::vector<Variant> variants();  // the catalog and the listed members of the families

// A name, an alias or a member of a family, optionally followed by a colon and the stages to
// change: "taylor4:norm=l2,denominator=nothing". Throws with the nearest names if it is unknown.
Variant find(std::string_view name);

// The variant of a name, or all listed ones that match a glob. Throws, with the nearest, for none.
std::vector<Variant> matching(const std::string& pattern);

// Warnings about a variant, such as "may be ill-conditioned: ...".
std::vector<std::string> notes(const Spec&);

}  // namespace horner::attn
