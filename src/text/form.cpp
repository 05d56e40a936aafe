// Form C by utf8proc.
#include "text/form.h"

#include <utf8proc.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>

#include "core/check.h"
#include "text/utf8.h"

namespace horner::text {

namespace {

// Combining marks added after Unicode 9. The tokenizers package normalizes by that version and
// treats them as ordinary characters; texts must give the tokens that models were trained on.
constexpr char32_t kLater[][2] = {
    {0x7fd, 0x7fd},     {0x898, 0x89f},     {0x8ca, 0x8d3},     {0x9fe, 0x9fe},
    {0xc3c, 0xc3c},     {0xd3b, 0xd3c},     {0xeba, 0xeba},     {0x1715, 0x1715},
    {0x1abf, 0x1ace},   {0x1df6, 0x1dfa},   {0xa82c, 0xa82c},   {0x10d24, 0x10d27},
    {0x10eab, 0x10eac}, {0x10efd, 0x10eff}, {0x10f46, 0x10f50}, {0x10f82, 0x10f85},
    {0x11070, 0x11070}, {0x1133b, 0x1133b}, {0x1145e, 0x1145e}, {0x11839, 0x1183a},
    {0x11930, 0x11930}, {0x1193d, 0x1193e}, {0x11943, 0x11943}, {0x119e0, 0x119e0},
    {0x11a34, 0x11a34}, {0x11a47, 0x11a47}, {0x11a99, 0x11a99}, {0x11d42, 0x11d42},
    {0x11d44, 0x11d45}, {0x11d97, 0x11d97}, {0x11f41, 0x11f42}, {0x16ff0, 0x16ff1},
    {0x1e08f, 0x1e08f}, {0x1e130, 0x1e136}, {0x1e2ae, 0x1e2ae}, {0x1e2ec, 0x1e2ef},
    {0x1e4ec, 0x1e4ef}};
bool is_later(char32_t c) {
  if (c < kLater[0][0]) return false;
  return std::any_of(std::begin(kLater), std::end(kLater),
                     [&](const auto& range) { return c >= range[0] && c <= range[1]; });
}

void append_known(std::string_view text, std::string& out) {
  utf8proc_uint8_t* made = nullptr;
  constexpr int options = UTF8PROC_STABLE | UTF8PROC_COMPOSE;
  const utf8proc_ssize_t size =
      utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                   utf8proc_ssize_t(text.size()), &made, utf8proc_option_t(options));
  check(size >= 0, "Unicode normalization failed: ", utf8proc_errmsg(size));
  out.append(reinterpret_cast<const char*>(made), size_t(size));
  std::free(made);
}

}  // namespace

// Characters below U+0300 do not change or combine.
bool stable_in_nfc(char32_t c) {
  if (c < 0x300) return true;
  if (c >= 0x1100 && c < 0x1200) return false;  // Hangul letters compose by arithmetic
  if ((c >= 0xAC00 && c < 0xD7A4) || is_later(c)) return true;
  const utf8proc_property_t* p = utf8proc_get_property(utf8proc_int32_t(c));
  return p->combining_class == 0 && p->decomp_seqindex == UINT16_MAX && p->comb_index == UINT16_MAX;
}

// The later marks stay as they are and separate what is around them.
void append_nfc(std::string_view text, std::string& out) {
  size_t done = 0;
  for (size_t at = 0; at < text.size();) {
    const size_t begin = at;
    if (!is_later(next(text, at))) continue;
    append_known(text.substr(done, begin - done), out);
    out += text.substr(begin, at - begin);
    done = at;
  }
  append_known(text.substr(done), out);
}

}  // namespace horner::text
