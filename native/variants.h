// The builds of the kernels and the choice between them.
#pragma once
#include <string>
#include <vector>

#include "kernels/kernels.h"

namespace sparkgap {

// Names of the variants in this build that this machine can run, best first.
std::vector<std::string> supported_variants();

// The kernels of the variant called `name`, or of the best one when `name` is empty. Throws std::runtime_error when
// there is no such variant or this machine cannot run it.
const KernelTable& kernels_of(const std::string& name);

}  // namespace sparkgap
