// The nouns that the parts of the reader share.  All rules are those of docs/format.md.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace reader {

using Bytes = std::string;
using Numbers = std::vector<int64_t>;

// A checkpoint that is damaged, or breaks a rule of the format.
struct Refused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline void require(bool holds, const std::string& otherwise) {
  if (!holds) throw Refused(otherwise);
}

// A JSON value; `text` has the digits of a number.
struct Json {
  enum Kind { null, boolean, number, string, list, object } kind = null;
  bool truth = false;
  std::string text;
  std::vector<Json> members;
  std::vector<std::string> names;

  const Json* find(const std::string& name) const;
  const Json& at(const std::string& name) const;
  const std::string& as_text() const;
  int64_t as_integer(int64_t least) const;
  const std::vector<Json>& as_list() const;
};

Json parse_json(const Bytes& document, bool is_manifest);
std::string quoted(const std::string& text);
bool is_utf8(const std::string& text);

struct File {
  std::string path;
  int64_t nbytes = 0;
  std::vector<uint64_t> digests;
};

// The place of the table of files in the index.
struct Table {
  int64_t start = 0, nbytes = 0, num_files = 0, files_nbytes = 0;
};

struct Manifest {
  std::string write_id, index, moved_to;
  int64_t block_nbytes = 0;
  bool has_table = false;
  Table table;
  std::vector<std::string> items;
  std::set<std::string> blobs;
  std::map<std::string, File> files;
};

uint64_t digest(const void* data, size_t nbytes);
void check_path(const std::string& path);
Manifest read_manifest(const std::string& root);
void add_table(Manifest& manifest, const Bytes& index);

// A checkpoint: its manifest, and files whose bytes are compared with their digests as they are read.
class Checkpoint {
 public:
  explicit Checkpoint(const std::string& root);
  const Manifest& manifest() const { return manifest_; }
  const Bytes& index() const { return index_; }
  Bytes read(const std::string& path, int64_t start, int64_t nbytes) const;
  void check(const std::string& path) const;

 private:
  std::string root_;
  Manifest manifest_;
  Bytes index_;
};

struct Chunk {
  Numbers offsets, lengths;
  std::string file;
  int64_t start = 0, nbytes = 0;
};

struct Tensor {
  std::string item, fqn, dtype;
  Numbers shape;
  std::vector<Chunk> chunks;
};

int64_t item_nbytes(const std::string& dtype);
int64_t num_elements(const Numbers& shape);
std::vector<Tensor> read_index(const Checkpoint& checkpoint);
void check_headers(const Checkpoint& checkpoint, const std::vector<Tensor>& tensors);
std::string shown_number(const std::string& dtype, const char* element);

}  // namespace reader
