# Removes what the last `make install` of this build tree wrote (below $DESTDIR, when set).
if(NOT EXISTS ${MANIFEST})
  message(FATAL_ERROR "nothing to uninstall: ${MANIFEST} not found")
endif()
file(STRINGS ${MANIFEST} files)
foreach(file ${files})
  message(STATUS "removing $ENV{DESTDIR}${file}")
  file(REMOVE "$ENV{DESTDIR}${file}")
  get_filename_component(dir "$ENV{DESTDIR}${file}" DIRECTORY)
  file(GLOB left "${dir}/*")
  if(dir MATCHES "/(kvasir|\\.debug)$" AND NOT left) # directories that are ours alone
    file(REMOVE_RECURSE "${dir}")
  endif()
endforeach()
