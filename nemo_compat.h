/*
 * nemo_compat.h
 *	  Small differences between PostgreSQL 15 and 18, in one place.
 *
 * Only renames and changed spellings live here, as macros and static inlines that cost nothing.  Where a release
 * changed what must be done (not how it is spelled), the #if stands at the place of use.
 */
#ifndef NEMO_COMPAT_H
#define NEMO_COMPAT_H

#include "postgres.h"

#include "access/tableam.h"
#include "access/xlogdefs.h"
#include "catalog/pg_class.h"
#include "storage/proc.h"
#include "utils/acl.h"
#include "utils/rel.h"

#if PG_VERSION_NUM < 150000
#error "Nemo needs PostgreSQL 15 or later"
#endif

/* ---- RelFileNode became RelFileLocator in 16 ----------------------------------------------------------------- */

#if PG_VERSION_NUM >= 160000
#include "storage/relfilelocator.h"

typedef RelFileLocator NemoRelFile;
typedef RelFileNumber NemoRelFileNumber;

#define NEMO_RELFILE(rel)			((rel)->rd_locator)		/* NemoRelFile of a Relation */
#define NEMO_RELFILE_SPC(file)		((file).spcOid)
#define NEMO_RELFILE_DB(file)		((file).dbOid)
#define NEMO_RELFILE_NUMBER(file)	((file).relNumber)
#define NEMO_SMGR_RELFILE(smgr)		((smgr)->smgr_rlocator.locator)
#define NEMO_RELFILE_EQUAL(a, b)	RelFileLocatorEquals(a, b)
#define nemo_relation_set_new_file	RelationSetNewRelfilenumber
#else
#include "storage/relfilenode.h"

typedef RelFileNode NemoRelFile;
typedef Oid NemoRelFileNumber;

#define NEMO_RELFILE(rel)			((rel)->rd_node)
#define NEMO_RELFILE_SPC(file)		((file).spcNode)
#define NEMO_RELFILE_DB(file)		((file).dbNode)
#define NEMO_RELFILE_NUMBER(file)	((file).relNode)
#define NEMO_SMGR_RELFILE(smgr)		((smgr)->smgr_rnode.node)
#define NEMO_RELFILE_EQUAL(a, b)	RelFileNodeEquals(a, b)
#define nemo_relation_set_new_file	RelationSetNewRelfilenode
#endif

/* ---- table AM: what tuple_update says about indexes (16: an enum that knows summarizing indexes) ------------- */

#if PG_VERSION_NUM >= 160000
typedef TU_UpdateIndexes NemoUpdateIndexes;

#define NEMO_UPDATE_INDEXES_NONE	TU_None
#define NEMO_UPDATE_INDEXES_ALL		TU_All
#else
typedef bool NemoUpdateIndexes;

#define NEMO_UPDATE_INDEXES_NONE	false
#define NEMO_UPDATE_INDEXES_ALL		true
#endif

/* ---- this backend's local transaction id (17: inside PGPROC.vxid) -------------------------------------------- */

#if PG_VERSION_NUM >= 170000
#define NEMO_MY_LXID				(MyProc->vxid.lxid)
#else
#define NEMO_MY_LXID				(MyProc->lxid)
#endif

/* ---- ownership of a relation (16: one function for all kinds of object) -------------------------------------- */

static inline bool
nemo_owns_relation(Oid relid, Oid role)
{
#if PG_VERSION_NUM >= 160000
	return object_ownercheck(RelationRelationId, relid, role);
#else
	return pg_class_ownercheck(relid, role);
#endif
}

#endif							/* NEMO_COMPAT_H */
