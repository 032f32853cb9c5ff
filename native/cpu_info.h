#pragma once
#include <map>
#include <string>

namespace sparkgap {

std::map<std::string, bool> cpu_features();
int usable_cores();

}  // namespace sparkgap
