// Gloo: collectives over TCP between CPUs; tensors on a GPU are copied through the CPU.
#include <cstdlib>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "train/comm_link.h"

namespace horner::train {

using Gloo = c10d::ProcessGroupGloo;

// The network interface: GLOO_SOCKET_IFNAME if set; the loopback on a single machine, which also
// works if the machine's own name does not resolve.
static auto device(const Ranks& r) {
  if (const char* name = std::getenv("GLOO_SOCKET_IFNAME"); name && *name)
    return Gloo::createDeviceForInterface(name);
  if (r.local_world == r.world) return Gloo::createDeviceForHostname("127.0.0.1");
  return Gloo::createDefaultDevice();
}

Backend gloo_backend(const Store& store, const Ranks& r, std::chrono::milliseconds timeout) {
  const auto options = Gloo::Options::create(timeout);
  options->devices.push_back(device(r));
  return c10::make_intrusive<Gloo>(store, r.rank, r.world, options);
}

}  // namespace horner::train
