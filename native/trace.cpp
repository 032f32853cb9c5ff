#include "trace.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <mutex>
#include <stdexcept>

namespace sparkgap {

namespace {

struct Names {
  std::mutex mutex;
  std::vector<std::string> names{""};
  std::map<std::string, uint32_t> numbers{{"", 0}};
};

Names& names() {
  static auto* instance = new Names;  // never destroyed: graphs may outlive static objects
  return *instance;
}

}  // namespace

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::string kind_of(const Call& call) { return kind_of(call.signature); }

std::string kind_of(const char* signature) {
  // "... [with Args = sparkgap::RmsNorm]" or "... [Args = sparkgap::RmsNorm]".
  const std::string text = signature;
  const size_t begin = text.find_last_of(": ") + 1;
  return text.substr(begin, text.find(']', begin) - begin);
}

uint32_t intern_name(const std::string& name) {
  Names& all = names();
  const std::lock_guard lock(all.mutex);
  const auto [entry, is_new] = all.numbers.try_emplace(name, uint32_t(all.names.size()));
  if (is_new) all.names.push_back(name);
  return entry->second;
}

std::string interned_name(uint32_t number) {
  Names& all = names();
  const std::lock_guard lock(all.mutex);
  return all.names.at(number);
}

void TraceRing::append_to(std::vector<TraceRecord>& out) const {
  const uint64_t first = dropped();
  for (uint64_t i = first; i < added_; i++) out.push_back(records_[i % records_.size()]);
}

Trace::Trace(size_t capacity) : capacity_(capacity) {
  if (capacity < 1) throw std::invalid_argument("a trace needs room for at least one record of each thread");
}

void Trace::grow(int threads) {
  while (rings_.size() < size_t(threads)) rings_.push_back(std::make_unique<TraceRing>(capacity_));
}

std::vector<TraceRecord> Trace::records() const {
  std::vector<TraceRecord> all;
  for (const auto& ring : rings_) ring->append_to(all);
  std::stable_sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.begin_ns < b.begin_ns; });
  return all;
}

uint64_t Trace::dropped() const {
  uint64_t sum = 0;
  for (const auto& ring : rings_) sum += ring->dropped();
  return sum;
}

}  // namespace sparkgap
