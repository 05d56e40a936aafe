// Stand-ins for the headers of gloo, which torch does not ship: only what c10d's
// ProcessGroupGloo.hpp needs to be read. None of these types is ever made or called from here; gloo
// itself is in torch.
#pragma once

namespace gloo {
class Algorithm;
}
