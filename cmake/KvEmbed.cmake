# kv_embed(OUT page_files.c TABLE ki_page_files FILES path=file ...)
#
# Write OUT, a C file with the bytes of plain files (.incbin) and the table `const struct kh_files TABLE`
# (src/http/files.h): each under the path that clients ask for.
function(kv_embed)
  cmake_parse_arguments(E "" "OUT;TABLE" "FILES" ${ARGN})
  set(types_html "text/html")
  set(types_js "text/javascript")
  set(types_css "text/css")
  set(types_svg "image/svg+xml")
  set(number 0)
  set(bytes)
  set(rows)
  set(sources)
  foreach(item ${E_FILES})
    string(REGEX MATCH "^([^=]+)=(.+)$" found "${item}")
    set(path ${CMAKE_MATCH_1})
    set(file ${CMAKE_MATCH_2})
    string(REGEX MATCH "[a-z]+$" suffix "${file}")
    file(SHA256 ${file} digest)
    string(SUBSTRING ${digest} 0 16 digest)
    set(name ${E_TABLE}_${number})
    string(APPEND bytes "__asm__(\".section .rodata\\n.hidden ${name}, ${name}_end\\n.globl ${name}, ${name}_end\\n\"\n"
           "        \"${name}: .incbin \\\"${file}\\\"\\n${name}_end: .byte 0\\n.previous\");\n"
           "extern const char ${name}[], ${name}_end[];\n")
    string(APPEND rows "    {\"${path}\", \"${types_${suffix}}; charset=utf-8\", \"\\\"${digest}\\\"\", ${name}, ${name}_end},\n")
    list(APPEND sources ${file})
    math(EXPR number "${number} + 1")
  endforeach()
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${sources}) # for the digests
  file(CONFIGURE OUTPUT ${E_OUT} CONTENT "/* Made by cmake/KvEmbed.cmake. */
#include \"http/files.h\"

@bytes@
extern const struct kh_files ${E_TABLE};
static const struct kh_file items[] = {
@rows@};
const struct kh_files ${E_TABLE} = {items, sizeof(items) / sizeof(items[0])};
" @ONLY)
  set_source_files_properties(${E_OUT} PROPERTIES OBJECT_DEPENDS "${sources}")
endfunction()
