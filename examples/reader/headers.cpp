// The headers of data files: do they say of each chunk what the index says?
#include <algorithm>

#include "reader.h"

namespace reader {
namespace {

struct Type {
  const char *name, *code;
  int64_t nbytes;
};

// Types without a code are stored as U8, with the item size as one more dimension.
constexpr Type kTypes[] = {
    {"bool", "BOOL", 1},           {"uint8", "U8", 1},          {"int8", "I8", 1},
    {"uint16", "U16", 2},          {"int16", "I16", 2},         {"uint32", "U32", 4},
    {"int32", "I32", 4},           {"uint64", "U64", 8},        {"int64", "I64", 8},
    {"float16", "F16", 2},         {"bfloat16", "BF16", 2},     {"float32", "F32", 4},
    {"float64", "F64", 8},         {"float8_e4m3fn", "F8_E4M3", 1}, {"float8_e5m2", "F8_E5M2", 1},
    {"float8_e4m3fnuz", "", 1},    {"float8_e5m2fnuz", "", 1},  {"float8_e8m0fnu", "", 1},
    {"float4_e2m1fn_x2", "", 1},   {"complex32", "", 4},        {"complex64", "", 8},
    {"complex128", "", 16},
};

const Type& type_of(const std::string& dtype) {
  for (const Type& type : kTypes)
    if (dtype == type.name) return type;
  throw Refused("unknown element type: " + quoted(dtype));
}

std::string key_of(const std::string& fqn, const Tensor& tensor, const Chunk& chunk) {
  static const char* digits = "0123456789ABCDEF";
  std::string key;
  for (size_t at = 0; at < fqn.size(); ++at) {
    uint8_t c = fqn[at];
    bool second = at > 0 && uint8_t(fqn[at - 1]) == 0xC2 && c >= 0x80 && c <= 0x9F;
    bool first = c == 0xC2 && at + 1 < fqn.size() && uint8_t(fqn[at + 1]) <= 0x9F;
    bool plain = c >= 0x20 && c != 0x7F && c != '[' && c != ']' && c != '%' && !first && !second;
    if (plain) key += char(c);
    else key += {'%', digits[c >> 4], digits[c & 15]};
  }
  if (fqn == "__metadata__") key = "%5F_metadata__";
  if (chunk.lengths == tensor.shape) return key;
  for (size_t d = 0; d < chunk.offsets.size(); ++d)
    key += (d ? "," : "[") + std::to_string(chunk.offsets[d]) + ":" +
           std::to_string(chunk.offsets[d] + chunk.lengths[d]);
  return key + "]";
}

struct Entry {
  std::string dtype;
  Numbers shape;
  int64_t start, nbytes;
};

struct Header {
  std::map<std::string, Entry> entries;
  std::map<std::string, std::string> aliases;
  std::string item;
};

Header read_header(const Checkpoint& checkpoint, const std::string& path) {
  Bytes prefix = checkpoint.read(path, 0, 8);
  uint64_t length = 0;
  for (size_t n = 0; n < 8; ++n) length |= uint64_t(uint8_t(prefix[n])) << 8 * n;
  require(length <= 100'000'000 && (8 + length) % 4096 == 0, path + " has a header of a wrong length");
  Bytes text = checkpoint.read(path, 8, int64_t(length));
  text.erase(text.find_last_not_of(' ') + 1);
  Json document = parse_json(text, false);
  Header header;
  const Json& metadata = document.at("__metadata__");
  for (const Json& value : metadata.members) value.as_text();
  require(metadata.at("reknit.format").text == "1", path + " is of another format");
  header.item = metadata.at("reknit.item").text;
  Json dtypes, none;
  if (const Json* found = metadata.find("reknit.dtypes")) dtypes = parse_json(found->text, false);
  if (const Json* found = metadata.find("reknit.aliases")) {
    Json aliases = parse_json(found->text, false);
    for (size_t n = 0; n < aliases.names.size(); ++n)
      header.aliases[aliases.names[n]] = aliases.members[n].as_text();
  }
  std::vector<std::pair<int64_t, int64_t>> ranges;
  for (size_t n = 0; n < document.names.size(); ++n) {
    const std::string& key = document.names[n];
    if (key == "__metadata__") continue;
    const Json& member = document.members[n];
    Entry entry{member.at("dtype").as_text(), {}, 0, 0};
    for (const Json& size : member.at("shape").as_list()) entry.shape.push_back(size.as_integer(0));
    if (const Json* other = dtypes.find(key)) {
      const Type& type = type_of(other->as_text());
      require(entry.dtype == "U8" && !entry.shape.empty() && entry.shape.back() == type.nbytes,
              path + " has a wrong entry for " + key);
      entry.shape.pop_back();
      entry.dtype = type.name;
    } else {
      auto type = std::find_if(std::begin(kTypes), std::end(kTypes),
                               [&](const Type& one) { return *one.code && one.code == entry.dtype; });
      require(type != std::end(kTypes), path + " has an entry of an unknown type: " + key);
      entry.dtype = type->name;
    }
    const auto& offsets = member.at("data_offsets").as_list();
    require(offsets.size() == 2, path + " has a wrong entry for " + key);
    int64_t first = offsets[0].as_integer(0), last = offsets[1].as_integer(first);
    entry.start = 8 + int64_t(length) + first;
    entry.nbytes = last - first;
    ranges.emplace_back(first, last);
    header.entries.emplace(key, std::move(entry));
  }
  std::sort(ranges.begin(), ranges.end());
  int64_t end = 0;
  for (auto [first, last] : ranges) {
    require(first == end, path + " has entries with a hole, or that overlap");
    end = last;
  }
  require(8 + int64_t(length) + end == checkpoint.manifest().files.at(path).nbytes,
          path + " does not end with its last entry");
  return header;
}

}  // namespace

int64_t item_nbytes(const std::string& dtype) { return type_of(dtype).nbytes; }

void check_headers(const Checkpoint& checkpoint, const std::vector<Tensor>& tensors) {
  std::map<std::string, Header> headers;
  for (const Tensor& tensor : tensors) {
    for (const Chunk& chunk : tensor.chunks) {
      auto [place, is_new] = headers.try_emplace(chunk.file);
      if (is_new) place->second = read_header(checkpoint, chunk.file);
      const Header& header = place->second;
      auto alias = header.aliases.find(tensor.fqn);
      std::string key = key_of(alias == header.aliases.end() ? tensor.fqn : alias->second, tensor, chunk);
      auto entry = header.entries.find(key);
      require(header.item == tensor.item && entry != header.entries.end() && entry->second.dtype == tensor.dtype &&
                  entry->second.shape == chunk.lengths && entry->second.start == chunk.start &&
                  entry->second.nbytes == chunk.nbytes,
              chunk.file + " does not have what the index says: " + key);
    }
  }
}

}  // namespace reader
