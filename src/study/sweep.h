// What the runs of a sweep of learning rates ask for: a rate beyond the edge of the grid where the
// best one is at the edge, and an early end for a run that another rate has left far behind.
#pragma once

#include "study/study.h"

namespace horner::study {

// The runs to add, none when every variant's best rate is inside its grid. `grid` has the runs of
// the study, `all` also those added before. A rate is best by the mean validation loss over seeds;
// the next one is as far from the edge as the edge is from its neighbour. A variant that solves its
// task at its best rate, or has `most` added rates on that side, is left as it is.
std::vector<Run> beyond_edges(const std::vector<Run>& grid, const std::vector<Run>& all,
                              size_t most);

// The same run at another rate, in the folder beside.
Run at_rate(const Run&, double rate);

// Why the run is given up, or "": at the latest validation that it and another rate of the same
// variant, task and seed have in common, not before the share `after` of its steps, its loss
// exceeds that of the other by more than the share `behind`, or is not finite.
std::string hopeless(const Run&, const std::vector<Run>& all, const GiveUp&);

}  // namespace horner::study
