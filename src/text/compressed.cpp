#include "text/compressed.h"

#include <array>
#include <memory>

#include "core/check.h"
#include "files/files.h"

#ifdef HORNER_LZMA
#include <lzma.h>
#endif
#ifdef HORNER_ZLIB
#include <zlib.h>
#endif
#ifdef HORNER_ZSTD
#include <zstd.h>
#endif

namespace horner::text {

namespace {

using Path = std::filesystem::path;
using Take = std::function<void(std::string_view)>;

constexpr size_t kPart = 1 << 20;

#ifdef HORNER_LZMA
void read_xz(std::string_view all, const Path& path, const Take& take) {
  lzma_stream s = LZMA_STREAM_INIT;
  const std::unique_ptr<lzma_stream, void (*)(lzma_stream*)> end(&s, lzma_end);
  check(lzma_stream_decoder(&s, UINT64_MAX, LZMA_CONCATENATED) == LZMA_OK,
        "liblzma cannot begin to read '", path.string(), "'");
  std::string part(kPart, '\0');
  s.next_in = reinterpret_cast<const uint8_t*>(all.data()), s.avail_in = all.size();
  for (lzma_ret state = LZMA_OK; state != LZMA_STREAM_END;) {
    s.next_out = reinterpret_cast<uint8_t*>(part.data()), s.avail_out = kPart;
    state = lzma_code(&s, LZMA_FINISH);
    check(state == LZMA_OK || state == LZMA_STREAM_END, "'", path.string(),
          "' is damaged or incomplete: xz error ", int(state));
    take(std::string_view(part).substr(0, kPart - s.avail_out));
  }
}
#endif

#ifdef HORNER_ZLIB
void read_gz(std::string_view all, const Path& path, const Take& take) {
  z_stream s = {};
  constexpr int kGzip = 15 + 16;  // the largest window, with gzip's header
  check(inflateInit2(&s, kGzip) == Z_OK, "zlib cannot begin to read '", path.string(), "'");
  const std::unique_ptr<z_stream, int (*)(z_stream*)> end(&s, inflateEnd);
  std::string part(kPart, '\0');
  int state = Z_OK;
  for (size_t at = 0; at < all.size() || state == Z_OK;) {
    if (s.avail_in == 0) {
      const size_t n = std::min(kPart, all.size() - at);
      s.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(all.data() + at));
      s.avail_in = uInt(n), at += n;
    }
    s.next_out = reinterpret_cast<Bytef*>(part.data()), s.avail_out = uInt(kPart);
    state = inflate(&s, Z_NO_FLUSH);
    check(state == Z_OK || state == Z_STREAM_END, "'", path.string(),
          "' is damaged or incomplete: gzip error ", state);
    take(std::string_view(part).substr(0, kPart - s.avail_out));
    if (state != Z_STREAM_END) continue;
    if (s.avail_in == 0 && at == all.size()) break;
    inflateReset(&s), state = Z_OK;  // several files, one after the other
  }
}
#endif

#ifdef HORNER_ZSTD
void read_zst(std::string_view all, const Path& path, const Take& take) {
  const std::unique_ptr<ZSTD_DStream, size_t (*)(ZSTD_DStream*)> s(ZSTD_createDStream(),
                                                                   ZSTD_freeDStream);
  check(s != nullptr, "zstd cannot begin to read '", path.string(), "'");
  std::string part(kPart, '\0');
  ZSTD_inBuffer in{all.data(), all.size(), 0};
  size_t left = all.empty() ? 1 : 0;  // 0 at the end of a frame
  while (in.pos < in.size || left > 0) {
    ZSTD_outBuffer out{part.data(), kPart, 0};
    const size_t before = in.pos;
    left = ZSTD_decompressStream(s.get(), &out, &in);
    check(!ZSTD_isError(left), "'", path.string(), "' is damaged: ", ZSTD_getErrorName(left));
    check(in.pos > before || out.pos > 0, "'", path.string(), "' is incomplete");
    take(std::string_view(part).substr(0, out.pos));
  }
}
#endif

struct Format {
  const char *suffix, *package;
  void (*read)(std::string_view, const Path&, const Take&);  // null: not in this build
};
constexpr std::array kFormats = {
#ifdef HORNER_LZMA
    Format{".xz", "liblzma-dev", read_xz},
#else
    Format{".xz", "liblzma-dev", nullptr},
#endif
#ifdef HORNER_ZLIB
    Format{".gz", "zlib1g-dev", read_gz},
#else
    Format{".gz", "zlib1g-dev", nullptr},
#endif
#ifdef HORNER_ZSTD
    Format{".zst", "libzstd-dev", read_zst},
#else
    Format{".zst", "libzstd-dev", nullptr},
#endif
};

}  // namespace

bool is_compressed(const Path& path) {
  for (const Format& f : kFormats)
    if (path.extension() == f.suffix) return true;
  return false;
}

void decompress(const Path& path, const Take& take) {
  for (const Format& f : kFormats) {
    if (path.extension() != f.suffix) continue;
    check(f.read != nullptr, "this build of horner cannot read '", path.string(), "': ", f.suffix,
          " requires ", f.package,
          " when horner is built; install it and rebuild, or decompress "
          "the file first");
    return f.read(files::MappedFile(path).text(), path, take);
  }
  fail("'", path.string(), "' is not a compressed file");
}

}  // namespace horner::text
