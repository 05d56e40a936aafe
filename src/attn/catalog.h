// Every attention variant with a name.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "attn/spec.h"

namespace horner::attn {

struct Variant {
  std::string name;
  Spec spec;
  std::string about;
  std::string source;
  std::string aliases = "";  // the names in the authors' code, separated by spaces
};

// A variant for every n: "taylor<n>".
struct Family {
  std::string_view name;  // without the number
  Spec (*make)(int n);
  std::string_view about, source;
  std::vector<int> listed;  // the members that `horner list` shows; every other n is there too
};

std::span<const Variant> catalog();
std::span<const Family> families();
std::vector<Variant> variants();  // the catalog and the listed members of the families

// A name, an alias or a family's member, and after a colon the stages to change in it:
// "taylor4:norm=l2,denominator=nothing". Throws with the nearest names when there is none.
Variant find(std::string_view name);

// What a reader of the variant should know: "may be ill-conditioned", and the like.
std::vector<std::string> notes(const Spec&);

}  // namespace horner::attn
