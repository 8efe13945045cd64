// Elements as text.
#include <cmath>
#include <cstdio>
#include <cstring>

#include "reader.h"

namespace reader {
namespace {

template <typename Number>
Number as(const char* element) {
  Number number;
  std::memcpy(&number, element, sizeof(Number));  // this program runs on little-endian machines
  return number;
}

std::string shown(double value, int digits) {
  if (std::isnan(value)) return "nan";
  char text[40];
  std::snprintf(text, sizeof text, "%.*g", digits, value);
  return text;
}

// A float of few bits, by the widths of its exponent and fraction and its bias.
// With `finite`, only the largest number is not one; with `no_minus_zero`, minus zero is not one, and the largest is.
double small_float(uint32_t bits, int exponent_bits, int fraction_bits, int bias, bool finite, bool no_minus_zero) {
  uint32_t sign = bits >> (exponent_bits + fraction_bits) & 1, top = (1u << exponent_bits) - 1;
  uint32_t exponent = bits >> fraction_bits & top, fraction = bits & ((1u << fraction_bits) - 1);
  double value;
  if (no_minus_zero && sign && !exponent && !fraction) return NAN;
  if (!no_minus_zero && exponent == top && (!finite || fraction == (1u << fraction_bits) - 1)) {
    if (finite || fraction) return NAN;
    value = INFINITY;
  } else if (exponent == 0) {
    value = std::ldexp(fraction, 1 - bias - fraction_bits);
  } else {
    value = std::ldexp(fraction + (1u << fraction_bits), int(exponent) - bias - fraction_bits);
  }
  return sign ? -value : value;
}

}  // namespace

std::string shown_number(const std::string& dtype, const char* element) {
  auto byte = uint8_t(*element);
  if (dtype == "bool") return byte ? "True" : "False";
  if (dtype == "uint8") return std::to_string(byte);
  if (dtype == "int8") return std::to_string(as<int8_t>(element));
  if (dtype == "uint16") return std::to_string(as<uint16_t>(element));
  if (dtype == "int16") return std::to_string(as<int16_t>(element));
  if (dtype == "uint32") return std::to_string(as<uint32_t>(element));
  if (dtype == "int32") return std::to_string(as<int32_t>(element));
  if (dtype == "uint64") return std::to_string(as<uint64_t>(element));
  if (dtype == "int64") return std::to_string(as<int64_t>(element));
  if (dtype == "float64") return shown(as<double>(element), 17);
  if (dtype == "float32") return shown(as<float>(element), 9);
  if (dtype == "float16") return shown(small_float(as<uint16_t>(element), 5, 10, 15, false, false), 9);
  if (dtype == "bfloat16") return shown(small_float(as<uint16_t>(element), 8, 7, 127, false, false), 9);
  if (dtype == "float8_e4m3fn") return shown(small_float(byte, 4, 3, 7, true, false), 9);
  if (dtype == "float8_e5m2") return shown(small_float(byte, 5, 2, 15, false, false), 9);
  if (dtype == "float8_e4m3fnuz") return shown(small_float(byte, 4, 3, 8, true, true), 9);
  if (dtype == "float8_e5m2fnuz") return shown(small_float(byte, 5, 2, 16, true, true), 9);
  if (dtype == "float8_e8m0fnu") return shown(byte == 255 ? NAN : std::ldexp(1.0, byte - 127), 9);
  if (dtype == "float4_e2m1fn_x2") {
    auto half = [](uint32_t bits) {
      double value = bits & 6 ? std::ldexp((bits & 1) + 2, int(bits >> 1 & 3) - 2) : (bits & 1) * 0.5;
      return shown(bits & 8 ? -value : value, 9);
    };
    return half(byte & 15) + "," + half(byte >> 4);
  }
  std::string part = dtype == "complex32" ? "float16" : dtype == "complex64" ? "float32" : "float64";
  return shown_number(part, element) + "," + shown_number(part, element + item_nbytes(part));
}

}  // namespace reader
