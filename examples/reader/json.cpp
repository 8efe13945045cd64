// JSON as the format restricts it: no name twice, valid Unicode, finite numbers, 32 levels.
#include <cerrno>
#include <cmath>
#include <cstdlib>

#include "reader.h"

namespace reader {
namespace {

constexpr int kLevels = 32;
constexpr int64_t kOtherValues = 1 << 18;

void append_utf8(std::string& out, uint32_t code) {
  if (code < 0x80) {
    out += char(code);
  } else if (code < 0x800) {
    out += {char(0xC0 | code >> 6), char(0x80 | (code & 63))};
  } else if (code < 0x10000) {
    out += {char(0xE0 | code >> 12), char(0x80 | (code >> 6 & 63)), char(0x80 | (code & 63))};
  } else {
    out += {char(0xF0 | code >> 18), char(0x80 | (code >> 12 & 63)), char(0x80 | (code >> 6 & 63)),
            char(0x80 | (code & 63))};
  }
}

class Parser {
 public:
  Parser(const Bytes& text, bool is_manifest) : text_(text), counts_(is_manifest) {}

  Json document() {
    require(is_utf8(text_), "a JSON document has invalid Unicode");
    space();
    Json value = parse("", 1);
    space();
    require(at_ == text_.size(), "a JSON document is followed by other bytes");
    return value;
  }

 private:
  // `place` is the top-level name above a value, followed by one slash for each level between.
  Json parse(const std::string& place, int level) {
    require(at_ < text_.size(), "a JSON document is cut short");
    char c = text_[at_];
    if (c == '{' || c == '[') return container(c, place, level);
    Json value;
    if (c == '"') {
      value.kind = Json::string;
      value.text = text();
    } else if (c == '-' || (c >= '0' && c <= '9')) {
      value.kind = Json::number;
      value.text = number();
    } else {
      for (const char* word : {"true", "false", "null"}) {
        if (text_.compare(at_, std::string(word).size(), word) == 0) {
          at_ += std::string(word).size();
          value.kind = word[0] == 'n' ? Json::null : Json::boolean;
          value.truth = word[0] == 't';
          return value;
        }
      }
      throw Refused("a JSON document has an unknown word");
    }
    return value;
  }

  Json container(char opening, const std::string& place, int level) {
    require(level <= kLevels, "a JSON document has more than 32 levels");
    Json value;
    value.kind = opening == '{' ? Json::object : Json::list;
    char closing = opening == '{' ? '}' : ']';
    std::set<std::string> seen;
    count(1);
    ++at_;
    space();
    bool first = true;
    while (at_ < text_.size() && text_[at_] != closing) {
      if (!first) {
        require(text_[at_] == ',', "a JSON document lacks a comma");
        count(1);
        ++at_;
        space();
      }
      first = false;
      std::string below = place.empty() ? place : place + "/";
      if (opening == '{') {
        require(at_ < text_.size() && text_[at_] == '"', "a JSON object lacks a name");
        std::string name = text();
        require(seen.insert(name).second, "a JSON object has a name twice: " + name);
        value.names.push_back(name);
        if (level == 1) below = name;
        else if (name == "coordinate") below += name;
        space();
        require(at_ < text_.size() && text_[at_] == ':', "a JSON object lacks a colon");
        ++at_;
        space();
      }
      value.members.push_back(parse(below, level + 1));
      space();
    }
    require(at_ < text_.size(), "a JSON document is cut short");
    ++at_;
    // The table's own members of `files` and `blobs` do not count.
    if (place == "files/" || place == "blobs/") count(-4);
    if (place == "blobs//coordinate") count(-int64_t(value.names.size()));
    return value;
  }

  void count(int64_t values) {
    others_ += values;
    require(!counts_ || others_ <= kOtherValues + 4096, "a manifest has too many values");
  }

  std::string number() {
    size_t from = at_;
    auto digits = [&] {
      size_t first = at_;
      while (at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9') ++at_;
      require(at_ > first, "a JSON number lacks digits");
    };
    if (text_[at_] == '-') ++at_;
    size_t first = at_;
    digits();
    require(text_[first] != '0' || at_ == first + 1, "a JSON number begins with 0");
    if (at_ < text_.size() && text_[at_] == '.') ++at_, digits();
    if (at_ < text_.size() && (text_[at_] | 32) == 'e') {
      ++at_;
      if (at_ < text_.size() && (text_[at_] == '+' || text_[at_] == '-')) ++at_;
      digits();
    }
    std::string found = text_.substr(from, at_ - from);
    require(std::isfinite(std::strtod(found.c_str(), nullptr)), "a JSON number is not finite");
    return found;
  }

  uint32_t hex4() {
    require(at_ + 4 <= text_.size(), "a JSON document is cut short");
    std::string digits = text_.substr(at_, 4);
    require(digits.find_first_not_of("0123456789abcdefABCDEF") == std::string::npos,
            "a JSON text has a wrong escape");
    at_ += 4;
    return uint32_t(std::stoul(digits, nullptr, 16));
  }

  std::string text() {
    std::string out;
    for (++at_; at_ < text_.size() && text_[at_] != '"';) {
      char c = text_[at_++];
      require(uint8_t(c) >= 0x20, "a JSON text has a control character");
      if (c != '\\') {
        out += c;
        continue;
      }
      require(at_ < text_.size(), "a JSON document is cut short");
      char escape = text_[at_++];
      static const std::string escapes = "\"\\/bfnrt", meant = "\"\\/\b\f\n\r\t";
      if (size_t place = escapes.find(escape); place != std::string::npos) {
        out += meant[place];
        continue;
      }
      require(escape == 'u', "a JSON text has a wrong escape");
      uint32_t code = hex4();
      if (code >= 0xD800 && code < 0xDC00 && text_.compare(at_, 2, "\\u") == 0) {
        at_ += 2;
        uint32_t low = hex4();
        require(low >= 0xDC00 && low < 0xE000, "a JSON text has a lone surrogate");
        code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
      }
      require(code < 0xD800 || code > 0xDFFF, "a JSON text has a lone surrogate");
      append_utf8(out, code);
    }
    require(at_ < text_.size(), "a JSON document is cut short");
    ++at_;
    return out;
  }

  void space() {
    while (at_ < text_.size() && std::string(" \t\r\n").find(text_[at_]) != std::string::npos) ++at_;
  }

  const Bytes& text_;
  size_t at_ = 0;
  bool counts_;
  int64_t others_ = 0;
};

}  // namespace

Json parse_json(const Bytes& document, bool is_manifest) { return Parser(document, is_manifest).document(); }

const Json* Json::find(const std::string& name) const {
  for (size_t n = 0; kind == object && n < names.size(); ++n)
    if (names[n] == name) return &members[n];
  return nullptr;
}

const Json& Json::at(const std::string& name) const {
  const Json* found = find(name);
  require(found != nullptr, "a JSON object lacks " + name);
  return *found;
}

const std::string& Json::as_text() const {
  require(kind == string, "a JSON value is not text");
  return text;
}

int64_t Json::as_integer(int64_t least) const {
  require(kind == number && text.find_first_of(".eE") == std::string::npos, "a JSON value is not an integer");
  errno = 0;
  int64_t value = std::strtoll(text.c_str(), nullptr, 10);
  require(errno == 0 && value >= least, "an integer is out of range: " + text);
  return value;
}

const std::vector<Json>& Json::as_list() const {
  require(kind == list, "a JSON value is not a list");
  return members;
}

bool is_utf8(const std::string& text) {
  for (size_t at = 0; at < text.size();) {
    uint8_t first = text[at++];
    if (first < 0x80) continue;
    int more = first >= 0xF0 ? 3 : first >= 0xE0 ? 2 : 1;
    if (first < 0xC2 || first > 0xF4 || at + more > text.size()) return false;
    uint32_t code = first & (0x3F >> more);
    for (int n = 0; n < more; ++n, ++at) {
      if ((uint8_t(text[at]) & 0xC0) != 0x80) return false;
      code = code << 6 | (text[at] & 63);
    }
    if ((more == 2 && code < 0x800) || (more == 3 && (code < 0x10000 || code > 0x10FFFF))) return false;
    if (code >= 0xD800 && code < 0xE000) return false;
  }
  return true;
}

std::string quoted(const std::string& text) {
  static const char* digits = "0123456789abcdef";
  std::string out = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    if (uint8_t(c) < 0x20) {
      out += std::string("\\u00") + digits[uint8_t(c) >> 4] + digits[c & 15];
    } else {
      out += c;
    }
  }
  return out + '"';
}

}  // namespace reader
