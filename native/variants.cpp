#include "variants.h"

#include <stdexcept>

#include "cpu_info.h"

namespace sparkgap {

#if defined(SPARKGAP_X86_VARIANTS)
namespace avx512 {
extern const KernelTable table;
}
namespace avx2 {
extern const KernelTable table;
}
#endif
namespace portable {
extern const KernelTable table;
}

namespace {

struct Variant {
  const KernelTable* table;
  bool supported;
};

const std::vector<Variant>& variants() {
  static const std::vector<Variant> all = [] {
    auto features = cpu_features();
    return std::vector<Variant>{
#if defined(SPARKGAP_X86_VARIANTS)
        {&avx512::table, features["avx512"] && features["avx512_vnni"]},
        {&avx2::table, features["avx2"]},
#endif
        {&portable::table, true},
    };
  }();
  return all;
}

std::string joined(const std::vector<std::string>& names) {
  std::string text;
  for (const auto& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

}  // namespace

std::vector<std::string> supported_variants() {
  std::vector<std::string> names;
  for (const auto& variant : variants())
    if (variant.supported) names.emplace_back(variant.table->name);
  return names;
}

const KernelTable& kernels_of(const std::string& name) {
  for (const auto& variant : variants()) {
    if (name.empty() ? !variant.supported : name != variant.table->name) continue;
    if (!variant.supported)
      throw std::runtime_error("this CPU lacks the instructions of the " + name + " kernels; it can run " +
                               joined(supported_variants()));
    return *variant.table;
  }
  std::vector<std::string> names;
  for (const auto& variant : variants()) names.emplace_back(variant.table->name);
  throw std::runtime_error("there are no kernels called " + name + "; this build has " + joined(names));
}

}  // namespace sparkgap
