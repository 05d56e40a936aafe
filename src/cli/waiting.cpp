// How the threads of OpenMP wait for each other. By default libgomp lets them spin, for longer than
// most loops here take: where other processes want the same cores, threads then wait for threads
// that do not run, and small steps take several times as long. Sleeping at once costs as much on
// idle cores; a few microseconds of spinning before sleep cost neither (docs/training.md). libgomp
// reads its environment when it is loaded, before main, so the program starts itself again with the
// variable set. This function runs before the initialisers of all libraries, which makes that
// second start cheap.
#include <alloca.h>
#include <unistd.h>

#include <cstring>

namespace {

bool names(const char* entry, const char* name) {
  const size_t n = std::strlen(name);
  return std::strncmp(entry, name, n) == 0 && entry[n] == '=';
}

// libc is not initialised yet: no malloc, no getenv, no environ.
void wait_shortly(int, char** argv, char** environment) {
  size_t n = 0;
  for (; environment[n]; ++n)
    if (names(environment[n], "OMP_WAIT_POLICY") || names(environment[n], "GOMP_SPINCOUNT")) return;
  char path[4096];
  const ssize_t length = ::readlink("/proc/self/exe", path, sizeof path - 1);
  if (length <= 0) return;
  path[length] = '\0';
  char spins[] = "GOMP_SPINCOUNT=5000";
  char** const with = static_cast<char**>(alloca((n + 2) * sizeof(char*)));
  std::memcpy(with, environment, n * sizeof(char*));
  with[n] = spins, with[n + 1] = nullptr;
  ::execve(path, argv, with);  // only returns if it fails; then threads spin
}

[[gnu::section(".preinit_array"), gnu::used]] void (*const first)(int, char**,
                                                                  char**) = wait_shortly;

}  // namespace
