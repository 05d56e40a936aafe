// Additions of Unicode 15 and 16 to the categories used in tokenizer patterns. The tokenizers
// package uses Unicode 16, the PCRE2 of Debian 12 uses 14; with a newer PCRE2 they are redundant.
#pragma once

#include <string_view>

namespace horner::text {

struct Category {
  std::string_view name, added;  // in the syntax of a set
};
inline constexpr Category kCategories[] = {
    {"L",
     "\\x{1c89}-\\x{1c8a}\\x{a7cb}-\\x{a7cd}\\x{a7da}-\\x{a7dc}\\x{105c0}-\\x{105f3}"
     "\\x{10d4a}-\\x{10d65}\\x{10d6f}-\\x{10d85}\\x{10ec2}-\\x{10ec4}"
     "\\x{1123f}-\\x{11240}\\x{11380}-\\x{11389}\\x{1138b}\\x{1138e}"
     "\\x{11390}-\\x{113b5}\\x{113b7}\\x{113d1}\\x{113d3}\\x{11bc0}-\\x{11be0}"
     "\\x{11f02}\\x{11f04}-\\x{11f10}\\x{11f12}-\\x{11f33}\\x{1342f}"
     "\\x{13441}-\\x{13446}\\x{13460}-\\x{143fa}\\x{16100}-\\x{1611d}"
     "\\x{16d40}-\\x{16d6c}\\x{18cff}\\x{1b132}\\x{1b155}\\x{1df25}-\\x{1df2a}"
     "\\x{1e030}-\\x{1e06d}\\x{1e4d0}-\\x{1e4eb}\\x{1e5d0}-\\x{1e5ed}\\x{1e5f0}"
     "\\x{2b739}\\x{2ebf0}-\\x{2ee5d}\\x{31350}-\\x{323af}"},
    {"N", ""},
    {"Lu", ""},
    {"Ll", ""},
    {"Lt", ""},
    {"Lm", ""},
    {"Lo", ""},
    {"M", ""},
    {"P", ""},
    {"S", ""},
    {"Nd", ""},
    {"Z", ""},
};

}  // namespace horner::text
