// Stand-ins for the headers of gloo, which torch does not ship: only the declarations that c10d's
// ProcessGroupGloo.hpp requires. Nothing here is instantiated or called; gloo itself is in torch.
#pragma once

namespace gloo {
class Algorithm;
}
